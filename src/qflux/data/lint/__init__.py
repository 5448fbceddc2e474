"""A look at a data set: what is in it, what will become of it, what is probably not meant."""
