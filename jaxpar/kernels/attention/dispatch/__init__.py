"""The choice of an attention backend."""
