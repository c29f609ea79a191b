"""Reads and writes model folders in the format of transformers."""
