"""Adapters: inject and train them, write and read their files."""
