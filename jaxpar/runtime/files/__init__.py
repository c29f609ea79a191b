"""Files that are whole, appended to, or locked, also while the disk is full."""
