"""The pipeline: schedules as arithmetic, and what plays them."""
