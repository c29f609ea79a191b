"""Frozen models beside the one that is trained: the reference of preferences, and a teacher."""
