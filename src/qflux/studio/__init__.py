"""A page on this machine: look at pairs, start a run, watch it learn, try it.

The studio imports no torch. It reads data and runs from their folders, writes configs and corrections, and starts
everything else as processes of their own (`python -m qflux.cli …`), which outlive it.
"""
