"""FSDP: weights gathered as they are used, gradients scattered."""
