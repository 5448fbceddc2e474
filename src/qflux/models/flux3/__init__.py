"""FLUX.3: klein, base and distilled."""
