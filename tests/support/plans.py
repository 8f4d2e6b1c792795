"""The plans of the statements that touch the outbox, as PostgreSQL makes them."""

from django.db import connection


def measured(action):
    """The executed plan of each statement of `action` that reads or writes the outbox."""

    def measure(cursor, sql, params):
        cursor.execute("SAVEPOINT measuring")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
        plan = cursor.fetchone()[0][0]["Plan"]
        cursor.execute("ROLLBACK TO measuring")
        return plan

    return _for_each_statement(action, measure)


def explained(action):
    """The plan of every statement that touches the outbox."""

    def explain(cursor, sql, params):
        cursor.execute(f"EXPLAIN {sql}", params)
        return "\n".join(line for (line,) in cursor.fetchall())

    return _for_each_statement(action, explain)


def nodes(plan):
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def of_the_table(node):
    return node.get("Relation Name", "").startswith("outbox_outboxmessage")


def _for_each_statement(action, explain):
    """What `explain` returns before each statement of `action` that touches the outbox, in the same transaction."""
    plans = []

    def wrapper(execute, sql, params, many, context):
        if "outbox_outboxmessage" in sql and sql.lstrip().startswith(("WITH", "SELECT", "UPDATE", "DELETE", "/*")):
            with context["connection"].connection.cursor() as cursor:
                plans.append(explain(cursor, sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        action()
    return plans
