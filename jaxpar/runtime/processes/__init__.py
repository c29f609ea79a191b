"""The processes of a run: found, started, joined, watched, parted."""
