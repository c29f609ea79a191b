"""The GPUs of this host: queries, peak rates and XLA flags."""
