"""All SQL of the outbox. Every function is named for its transition and carries its guard.

Two databases are spoken to, PostgreSQL and SQLite, and they differ in one thing that matters: who may relay.

- On PostgreSQL relays are equals. A pass takes transaction-scoped advisory locks on some *shards*; the server frees them the
  moment the transaction or the connection ends, so a killed relay holds nothing and a relay that overslept finds its
  transaction gone. Nothing here outlives a transaction, so a transaction-pooling proxy may stand in between.
- SQLite has one writer. There one relay holds a *lease* with a token, and works in short transactions so that the write lock
  is never held while a broker is waited for.
"""
