"""`python -m qflux.cli` is `qflux`."""

from qflux.cli import main

main()
