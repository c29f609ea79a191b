"""One layout's memory and time, predicted."""
