"""Benchmarks: every figure is a ratio of two sides that were measured in the same run. See README.md beside this file."""
