"""The GPT-3 block: a feed-forward without a gate, the parallel block, and learned positions."""
