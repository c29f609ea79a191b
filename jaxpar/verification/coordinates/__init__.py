"""The coordinate check of µP, `python -m jaxpar.verify --mup`: the size of activations by width."""
