"""Adapters as PEFT writes them."""
