"""Pipeline parallelism: schedules, and the loops that run them."""
