"""Tests kernels on this device once, before the first step of a run."""
