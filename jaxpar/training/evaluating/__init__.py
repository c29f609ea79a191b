"""What a run is evaluated on, its losses there, and what follows from them."""
