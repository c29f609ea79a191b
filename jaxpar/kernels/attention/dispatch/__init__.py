"""Which backend of attention a request gets, and why."""
