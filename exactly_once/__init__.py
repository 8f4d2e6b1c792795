"""What the outbox and the inbox stand on: the message format, processes, SQL, and the console that operators see.

It imports neither half. The halves register what they add: sections of a page, conditions of an alert, the trail of a message.

| package | what is in it |
|---|---|
| `wire` | the message format: envelope, body, identity, context. Plain Python |
| `process` | a long-running process: stop requests, loops, liveness, outages |
| `sql` | PostgreSQL and SQLite: connections, clock, prepared statements, classes of errors |
| `telemetry` | spans, metrics, statistics of each minute |
| `operators` | what operators do, as functions: audit log, alerts, bulk operations, redaction |
| `cli`, `admin`, `http` | the same as commands, pages, and the frame of the HTTP APIs |
"""
