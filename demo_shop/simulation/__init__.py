"""Simulate a day in the shop: customers, a payment provider, a supplier, and killed processes.

`story` runs it from opening to audit. All data of a run contain the run's name, which separates them from the data of
earlier runs.
"""
