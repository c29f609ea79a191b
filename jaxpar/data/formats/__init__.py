"""Tokens on disk: ours, Megatron's, nanoGPT's, llm.c's."""
