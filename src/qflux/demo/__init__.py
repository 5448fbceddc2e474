"""The offline demo: data made in code, a tiny model, the whole path."""
