"""The network between the hosts of a run: what a host has, and NCCL's variables for it."""
