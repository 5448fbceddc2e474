"""Training. `fit` puts a run together, `loop` does its steps; start reading at `loop`.

1. `batches`       the steps of the plan, each with the micro-batches of this rank, read ahead
2. `model`         what of a transformer trains, in what precision, on how many processes (`distributed`)
3. `optimizer/`    the step and everything that changes parameters
4. `step_metrics`  from the device to the report of a step without waiting (`flops`)
5. `validation`    the held-out loss; `edits` draws pictures
6. `checkpoint`    folders that appear complete or not at all; `resume_guard` says what a resumed run must share
7. `preflight/`    what would fail later, found before the first step
8. `signals`       what surrounds a run
"""
