"""All SQL of the inbox. Every function is named for its transition and carries its guard.

Callers import its modules. Everything depends on two statements. The INSERT of `arrivals.begin_fresh` is unique on (handler,
topic, biz-id) and the first one in the handler's transaction. The UPDATE of `sentinel.finish`, the *commit sentinel*, is the
last one in the same transaction and must hit exactly the row that the transaction began with.
"""
