"""Fake servers, whose faults a test controls."""
