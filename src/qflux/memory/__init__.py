"""Models that do not fit: weights that wait in host memory, activations that are computed again, and how to count both.

It knows modules and tensors; which model they are of, and what is best for it, others know.
"""
