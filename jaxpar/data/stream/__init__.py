"""Streamed datasets: an index of text that stays where it is, and is tokenized during training.

Prepare:  frames, sources -> cutting -> writing -> index        (`prepare --stream`)
Train:    index -> texts -> encoder -> worker, pool -> tokens   (the `tokens` of a `TokenDataset`)
"""
