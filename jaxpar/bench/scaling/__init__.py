"""Measures how the speed of the train step scales with the number of devices."""
