"""Joins: a handler that is called once when messages of several topics have come, matched by a run id.

    @idempotent_handler(all_of=["orders.exported", "stock.exported"], correlate="run_id", deadline=timedelta(hours=2))
    def build_report(join: Join) -> None:
        orders, stock = join["orders.exported"], join["stock.exported"]

Each awaited message is an ordinary message of an ordinary handler, which stores it as a part of its run (`collecting`). The
first part also stores the run's own inbox row, due at the deadline. The last part makes that row due now. The runner executes
it as any stored message: retries, dead letters, timeouts and the exactly-once effect are those of the inbox.

An optional app: add "inbox.joins" to INSTALLED_APPS. The rest of the inbox does not import it.
"""

from inbox.joins.join import Join

__all__ = ["Join"]
