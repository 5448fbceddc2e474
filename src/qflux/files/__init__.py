"""Files that survive a kill: written whole, locked, hashed, read line by line. Knows nothing of images or models."""
