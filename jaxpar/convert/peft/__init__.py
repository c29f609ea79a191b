"""Reads and writes adapters in the format of PEFT."""
