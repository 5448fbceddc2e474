"""Thousands of bad inputs and kills, each drawn from a seed, against an oracle that knows what may come of them.

    make torture MINUTES=30 SEED=1
    python -m torture --repeat kills.fit:17 --seed 1       # a failure, again

Allowed is: exit code 0 with the right result, or exit code 2 with one readable message that names what is wrong; after
a kill, that the same command ends in the same bytes. Never a traceback, a hang, a wrong batch, a lost step, something
half-written, or more than 2 GiB of memory.

`ground` is what everything is done to: a small data set, a tiny real checkpoint, a cache, and what commands make of
them undisturbed. `cases` runs commands and judges them, `crash` kills them at a line of their code, `attacks/` are the
generators, `faults` are bugs put into the code to see whether they would be found.
"""
