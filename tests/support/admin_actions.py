"""Every action of the admin, and a row for each on which it has an effect, with a hostile text in its columns."""

import json
from datetime import timedelta
from functools import partial

from django.contrib import admin

from exactly_once.models import Alert, Operation, Process
from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from inbox.contrib.joins.models import Run
from inbox.contrib.outgoing_webhooks import Endpoint
from inbox.contrib.tasks.models import Result
from inbox.models import PausedHandler
from outbox.contrib.recurring import recurring
from outbox.contrib.recurring.models import Schedule
from outbox.models import PausedTopic, PendingCallback
from outbox.states import State
from tests.support.admin_pages import NASTY, a_message
from tests.support.heartbeats import a_relay
from tests.support.joins import TOPICS, comes
from tests.support.own_apps import OWN_APPS
from tests.support.shop_day import CHARGE, failing

PAGES = {model._meta.label: page for model, page in admin.site._registry.items() if model._meta.app_label in OWN_APPS}
"""The pages of the admin, by the labels of their models."""
ACTIONS = {(label, action.name): action for label, page in PAGES.items() for action in page.actions or ()}
A_CONFLICT = {
    **dict.fromkeys(("key", "source", "correlation_id", "causation_id", "traceparent"), ""),
    "content_type": "application/json",
    "headers": "{}",
    "created_at": None,
}
TEXTS = {"reason": "asked by the customer", "delay": "30m", "payload": json.dumps({"amount": NASTY})}
TASK = json.dumps(
    {"task": "tests.support.apps.tasked.tasks.note", "args": [NASTY], "kwargs": {}, "backend": "default"}
).encode()
TEXTS["payloads"] = json.dumps({topic: {} for topic in TOPICS[1:]})
"""What an operator writes into the fields of the confirmation pages."""


def _message(state, **given):
    names = {"topic": NASTY, "biz_id": NASTY, "last_error": NASTY, "payload": {NASTY: NASTY}}
    return a_message(state, ago=timedelta(minutes=5), due_ago=-timedelta(minutes=5), **names, **given)


def _callback():
    times = {"settled_at": DatabaseTime(), "available_at": DatabaseTime()}
    message = _message(State.PUBLISHED, settled_at=DatabaseTime())
    return PendingCallback.objects.create(message=message, event="published", callback=NASTY, **times)


def _alert():
    times = {"first_seen_at": DatabaseTime(), "seen_at": DatabaseTime(), "raised_at": DatabaseTime()}
    return Alert.objects.create(app="outbox", condition=NASTY[:64], object=NASTY, summary=NASTY, state="raised", **times)


def _paused(model, **given):
    return model.objects.create(paused_by=NASTY, reason=NASTY, paused_at=DatabaseTime(), **given)


def _process(**given):
    return Process.objects.get(pk=a_relay(host=NASTY, **given).id)


def _dead_letter(biz_id, **given):
    return failing(CHARGE, biz_id, (NASTY, NASTY, NASTY), dead=True, body=json.dumps({"of": NASTY}).encode(), **given)


def _operation(**given):
    texts = {"action": "cancel", "selection": NASTY, "requested_by": NASTY, "planned_at": DatabaseTime()}
    operation = Operation.objects.create(app="outbox", **texts, **given)
    operation.parts.create(rows=[1])
    return operation


def _run(run_id):
    comes(TOPICS[0], run_id)
    return Run.objects.get(run_id=run_id)


def _endpoint(**given):
    return Endpoint.objects.create(name=NASTY[:64], url=f"https://example.com/{NASTY}", reason=NASTY, **given)


def _schedule(name, **given):
    # On the other database, so that no relay of a later test has it.
    recurring(every=timedelta(days=1), name=name, using="other")(lambda tick: None)
    return Schedule.objects.create(name=name, recurrence=NASTY, error=NASTY, position=DatabaseTime(), **given)


def _result(action):
    row = failing("tasks.default", f"{NASTY} {action}", (NASTY, NASTY, NASTY), dead=True, topic="tasks.default", body=TASK)
    errors = [{"exception_class_path": NASTY, "traceback": NASTY}]
    texts = {"message_id": row.message_id, "queue": "default", "task": NASTY, "body": TASK, "key": NASTY, "errors": errors}
    return Result.objects.create(status="FAILED", finished_at=utcnow(), expires_at=utcnow(), **texts)


def rows_to_act_on():
    """What makes a row for each action. They need the join of `tests.support.joins`, and the fixture `tasked`."""
    found = {("outbox.OutboxMessage", action): partial(_message, State.DEAD) for action in ("restore", "export")}
    for action in ("publish_now", "reschedule", "cancel"):
        found["outbox.OutboxMessage", action] = partial(_message, State.SCHEDULED)
    for action in ("commit", "roll_back", "ask_again"):
        found["outbox.OutboxMessage", action] = partial(_message, State.STUCK)
    found["outbox.PausedTopic", "resume"] = partial(_paused, PausedTopic, topic=NASTY)
    found["inbox.PausedHandler", "resume"] = partial(_paused, PausedHandler, handler=NASTY)
    for action in ("pause", "resume", "drain", "stop"):
        found["exactly_once.Process", action] = partial(_process, **{"mode": "paused"} if action == "resume" else {})
    for action in ("call_now", "discard"):
        found["outbox.PendingCallback", action] = _callback
    found["exactly_once.Alert", "acknowledge"] = _alert
    for action in ("retry", "edit", "dry_run", "skip", "export"):
        found["inbox.InboxMessage", action] = partial(_dead_letter, f"{NASTY} {action}")
    found["inbox.InboxMessage", "override_maximum_age"] = partial(_dead_letter, NASTY, quarantined=True)
    conflict = {"conflicts": 1, "duplicates": 1, "conflicting_id": NASTY, "conflicting_body": b"{}", "conflicting_at": utcnow()}
    found["inbox.InboxMessage", "run_conflicting"] = partial(
        _dead_letter, f"{NASTY} conflict", conflicting_attributes=A_CONFLICT, **conflict
    )
    found["exactly_once.Operation", "cancel"] = partial(_operation, state="planned")
    found["exactly_once.Operation", "continue"] = partial(_operation, state="stopped")
    for action in ("complete", "extend", "start"):
        found["inbox_joins.Run", action] = partial(_run, f"{NASTY} {action}")
    for action in ("test", "edit", "rotate", "enable", "disable"):
        state = "disabled" if action == "enable" else "active"
        found["inbox_outgoing_webhooks.Endpoint", action] = partial(_endpoint, state=state)
    for action in ("pause", "resume", "run"):
        given = {"paused_at": DatabaseTime()} if action == "resume" else {}
        found["outbox_recurring.Schedule", action] = partial(_schedule, f"{NASTY} {action}", **given)
    for action in ("retry", "enqueue"):
        found["inbox_tasks.Result", action] = partial(_result, action)
    return found
