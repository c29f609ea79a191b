"""Checkpoints of Megatron-LM: read without running their pickles."""
