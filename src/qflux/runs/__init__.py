"""What a run writes into its folder, and how it is read again. No torch: reports and web pages only read.

1. `paths`        every file of a run, by name
2. `metrics`      a line per step and per validation
3. `ledger`       which samples trained when, and what was left out
4. `journal`      writes all of it while a run goes, and tells trackers (`trackers`)
5. `folder`       reads it: of a finished run, a running one, or one that was killed
6. `environment`  what the run was computed on
"""
