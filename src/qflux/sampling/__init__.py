"""From noise to images: `sampler` integrates, `predict` prepares, schedules, denoises and decodes."""
