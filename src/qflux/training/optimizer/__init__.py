"""Everything that changes parameters: the optimizer, its schedule, the step, the running average, the loss scale."""
