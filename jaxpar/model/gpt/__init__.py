"""The GPT-3 block: a feed-forward without a gate, attention beside it, and learned positions."""
