"""jaxpar: pure-functional pre-training of language models in JAX, sharded over one named mesh."""

__version__ = "0.1.0"
