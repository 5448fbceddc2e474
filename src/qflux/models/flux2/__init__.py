"""FLUX.2: klein and dev."""
