"""The train step, measured."""
