"""A delivery of a task without a broker: traced as a worker's process traces it."""

import uuid

from celery import states
from celery.app.trace import build_tracer


def deliver(task, *args, task_id=None, redelivered=False, retries=0, kwargs=None, **request):
    """What a worker does with one message; the state it comes to, and what was returned or raised."""
    given = {
        "id": task_id or str(uuid.uuid4()),
        "retries": retries,
        "delivery_info": {"exchange": "", "routing_key": "celery", "priority": None, "redelivered": redelivered},
        **request,
    }
    trace = build_tracer(task.name, task, app=task.app)
    traced = trace(given["id"], args, kwargs or {}, given)
    if traced.info is None:
        return states.SUCCESS, traced.retval
    return traced.info.state, traced.info.retval
