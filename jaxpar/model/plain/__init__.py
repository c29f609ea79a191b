"""The model in plain `jax.numpy`, on one device: what every mesh is compared with."""
