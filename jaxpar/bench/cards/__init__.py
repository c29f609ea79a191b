"""Cards of figures, compared."""
