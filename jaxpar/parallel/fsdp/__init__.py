"""FSDP: gather weights before their use, and scatter their gradients."""
