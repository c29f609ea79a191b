"""Rules about objectives that replace next-token cross entropy, or are added to it."""
