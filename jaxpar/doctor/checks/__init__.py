"""Pure functions from facts and figures to findings."""
