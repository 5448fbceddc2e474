"""Training. Start reading at `trainer`."""
