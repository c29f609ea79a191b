"""The rules that a config must satisfy, each with a fix. `validate.py` applies them."""
