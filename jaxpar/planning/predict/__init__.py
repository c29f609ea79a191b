"""Predicts the memory and step time of one layout."""
