"""Export and import of the inbox's dead letters, with the steps that they had completed."""

from collections.abc import Iterator, Mapping
from typing import Any

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from exactly_once.console.operators.audit import Subject
from exactly_once.console.operators.dead_letters import Letters, Refused, value_of
from exactly_once.wire.text import ERROR_LENGTH, printable
from inbox.conf import inbox_options
from inbox.handlers.registry import may_exist, registry
from inbox.models import InboxMessage, Receipt, Step
from inbox.receiving.reading import outside_window, stored_envelope
from inbox.states import State
from inbox.store import receipts
from inbox.store.ordering import hold_gates
from inbox.store.trail_entries import record

COLUMNS = (
    *("handler", "topic", "biz_id", "message_id", "key", "ordered", "content_type", "digest", "headers"),
    *("source", "correlation_id", "causation_id", "traceparent"),
    *("attempts", "fence", "quarantined", "last_error", "error_class", "error_place", "failing_since", "failed_at"),
    *("failures", "traceback", "created_at", "received_at", "settled_at"),
)
"""The columns of a dead letter besides its body."""
STEP_COLUMNS = ("name", "result", "taken_at")


_STEPS = "steps"
_STEP_FIELDS: Mapping[str, Any] = {name: Step._meta.get_field(name) for name in STEP_COLUMNS}


class InboxLetters(Letters):
    """A line also has the completed steps of its message."""

    def insert(self, alias: str, values: Mapping[str, Any], reason: str) -> None:
        """In an order it is the last of its key.

        One that is older than the maximum message age is quarantined: it may have been handled here, and its row purged since.

        Raises:
            Refused: this service has no such handler, or not on this database; or it is a join.
        """
        handler = registry.get(values["handler"])
        if not may_exist(values["handler"]):
            raise Refused(_("this project has no handler %(handler)s") % {"handler": values["handler"]})
        if handler is not None and handler.kind.all_of:
            raise Refused(_("it is the row of a join's run, and the messages of the run are not in the file"))
        if handler is not None and handler.using != alias:
            raise Refused(_("the database of its handler is %(alias)s; use --database") % {"alias": handler.using})
        given = {name: value for name, value in values.items() if name != _STEPS}
        if not given.get("quarantined") and (why := _why_quarantined(given)):
            error = printable(f"{why}\nIts error was: {given.get('last_error', '')}", ERROR_LENGTH)
            given |= {"quarantined": True, "last_error": error}
        if given.get("ordered"):
            hold_gates(alias, given["handler"], [given.get("key", "")])
        row = receipts.create(alias, **given, state=State.DEAD)
        Step.objects.using(alias).bulk_create(Step(message=row, **step) for step in values[_STEPS])
        record(alias, [row.pk], was="", reason=reason)

    def _state_of(self, alias: str, values: Mapping[str, Any]) -> str:
        row = receipts.named(alias, values["handler"], values["topic"], values["biz_id"]).only("state").first()
        if row is not None:
            return str(row.get_state_display())
        of_it = Receipt.objects.using(alias).filter(**{name: values[name] for name in ("handler", "topic", "biz_id")})
        return str(State.DONE.label) if of_it.exists() else ""

    def subject(self, values: Mapping[str, Any]) -> Subject:
        message_id = values["message_id"]
        name = f"{message_id or 'without id'} ({values['topic']} {values['biz_id']}, {values['handler']})"
        return Subject(kind="message", id=message_id, name=name)

    def lines(self, rows: QuerySet[Any]) -> Iterator[str]:
        return super().lines(rows.prefetch_related(_STEPS))

    def values(self, row: Any) -> dict[str, Any]:
        steps = [{name: getattr(step, name) for name in _STEP_FIELDS} for step in row.steps.all()]
        return {**super().values(row), _STEPS: steps}

    def taken(self, given: dict[str, Any]) -> dict[str, Any]:
        steps = given.pop(_STEPS, [])
        if not (isinstance(steps, list) and all(map(_is_step, steps))):
            raise Refused(_("its steps are not a list of objects with %(names)s") % {"names": ", ".join(_STEP_FIELDS)})
        taken = [{name: value_of(field, step[name]) for name, field in _STEP_FIELDS.items()} for step in steps]
        return {**super().taken(given), _STEPS: taken}


def _is_step(given: Any) -> bool:
    return isinstance(given, dict) and given.keys() == _STEP_FIELDS.keys()


letters = InboxLetters("inbox", InboxMessage, COLUMNS, ["handler", "topic", "biz_id"])


def _why_quarantined(row: Mapping[str, Any]) -> str:
    envelope = stored_envelope(InboxMessage(**{**row, "created_at": row.get("created_at") or row["received_at"]}))
    return outside_window(envelope, inbox_options())
