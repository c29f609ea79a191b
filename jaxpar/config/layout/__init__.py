"""The layout of a run: its fields, and how the layers are split over a pipeline."""
