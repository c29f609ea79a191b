"""Attention's backends, measured."""
