"""All SQL of the outbox. Each function is named for its transition and contains the guard of the transition.

PostgreSQL and SQLite are supported. They differ in which process may relay:

- On PostgreSQL all relays are equal. A pass takes transaction-scoped advisory locks on some *shards*. The server releases them
  when the transaction or the connection ends, so a killed relay holds no lock, and a relay that was frozen finds that its
  transaction has ended. No state outlives a transaction, so a transaction-pooling proxy may be in between.
- SQLite has one writer. One relay holds a *lease* with a token, and works in short transactions, so that it does not hold the
  write lock while it waits for a broker.
"""
