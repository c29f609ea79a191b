"""What the lists of a config say of a run: sizes of steps, weights, sets of text."""
