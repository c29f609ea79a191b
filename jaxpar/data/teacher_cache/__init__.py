"""A teacher's likeliest next tokens, kept in files: `cache` stores them, and `loader` adds them to
batches."""
