"""Edits that are files: `lists` says which, `run` makes them, `gallery` keeps them through any interruption."""
