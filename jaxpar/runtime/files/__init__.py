"""Atomic writes, append-only logs and locks, which also handle a full disk."""
