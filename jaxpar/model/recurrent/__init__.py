"""Recurrent layers: Gated DeltaNet, and what it shares with other recurrences over tokens."""
