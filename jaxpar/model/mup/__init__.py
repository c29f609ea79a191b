"""Maximal update parametrization (µP): how parameters and factors depend on the model's width."""
