"""Lease mode: messages whose effects are outside the database, run by one owner at a time."""
