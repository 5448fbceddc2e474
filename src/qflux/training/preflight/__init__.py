"""Before a run spends time: `probes` needs no weights, `check` says what they find, `rehearsal` tries the rest once."""
