"""Token formats: jaxpar's, and in `others.py` other programs'."""
