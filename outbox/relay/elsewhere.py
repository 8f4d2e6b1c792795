"""Companions of the relay that an optional package adds when Django is ready."""

companions_elsewhere: list[str] = []
"""The dotted names of functions that make them from the arguments of `callback_worker.callers`."""
