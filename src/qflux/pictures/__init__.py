"""What people would rather look at than read, as images: grids of edits, batches to scale, curves, in any script."""
