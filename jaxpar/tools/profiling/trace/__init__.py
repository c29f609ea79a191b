"""Takes and reads profiler traces."""
