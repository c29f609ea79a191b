"""The coordinate check of µP, `python -m jaxpar.mup`: the size of activations by width."""
