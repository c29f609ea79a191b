"""Rules about objectives in place of next-token cross entropy, or beside it."""
