"""A handler's limits: rate, concurrency, load shedding."""
