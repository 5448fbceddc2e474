"""From noise to images: `prepare` encodes an edit, `sampler` integrates, `predictor` decodes; `jobs` for many."""
