"""What trains nothing: checks of a machine, profiles, measurements, reports and sweeps.

No other package imports it: the commands connect the two.
"""
