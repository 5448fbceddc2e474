"""Matrix products in 8 bits, forward and backward, of layers whose weights are frozen."""
