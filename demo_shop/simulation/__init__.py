"""A busy day in the shop: customers, a payment provider, a supplier, and somebody who pulls plugs.

`story` tells it from opening to audit. Everything a run does carries the run's name, so that it is found again among
what earlier runs have left in the database.
"""
