"""Folders as transformers writes them."""
