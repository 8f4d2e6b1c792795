"""All SQL of the inbox. Every function is named for its transition and carries its guard.

Callers import its modules. The one statement everything rests on is the INSERT of `arrivals.begin_fresh`: unique on (handler,
topic, biz-id), first in the handler's transaction. The other is the UPDATE of `sentinel.finish`, the *commit sentinel*: last in
the same transaction, it must hit exactly the row that the transaction began with.
"""
