"""Speculative decoding: multi-token prediction drafts tokens, and the model verifies them."""
