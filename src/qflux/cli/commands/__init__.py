"""One command per file: parse, call `qflux.commands`, show progress, print."""
