"""The example of docs/how-to/prepared-messages.md: transfers from the savings bank's database to the giro bank's.

The outbox and the inbox are the giro bank's, the alias `default`.
"""

SAVINGS = "other"
"""The alias of the savings bank."""
