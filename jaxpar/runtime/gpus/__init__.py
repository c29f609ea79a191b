"""The GPUs of this host: which, how fast, with which flags of XLA."""
