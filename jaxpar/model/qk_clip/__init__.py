"""QK-clip: weights of queries and keys shrink where attention logits grow too large (MuonClip)."""
