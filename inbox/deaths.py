"""The handlers with a function for their dead letters. The registry of handlers adds them; the store knows no handlers."""

SUFFIX = ".on_dead"
"""Of the name of the handler that the function is."""
reported: set[str] = set()
"""The names of the handlers that have one."""
