"""The expert axis: which rows go to the device of which expert, and how tokens travel."""
