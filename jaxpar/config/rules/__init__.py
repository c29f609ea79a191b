"""The rules of a config, each with a fix; `validate.py` applies them."""
