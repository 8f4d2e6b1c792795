"""What the threads of this process run now: handlers, callbacks and checkers of users, and the passes of a relay.

A heartbeat writes it, so that operators see also what has no row until it commits. Nothing is written for a message: to begin
and to end only change a dictionary.
"""

import threading
from typing import Any, NamedTuple

from exactly_once.process.clock import monotonic
from exactly_once.process.main_thread import stack_of
from exactly_once.wire.text import one_line

_MOST = 50
_STACK_AFTER_SECONDS = 60.0
_STACK_LENGTH = 2_000


class Work(NamedTuple):
    """What one thread runs.

    Attributes:
        app: the package whose process it is.
        what: the name of a handler, callback or topic; "" for a pass of a relay.
        message: the id of its message, or of the first of `messages`; "" if it is not known.
        began_at: monotonic.
    """

    app: str
    alias: str
    what: str
    message: str
    messages: int
    began_at: float


_now: dict[int, Work] = {}
"""By thread."""


def begin(app: str, alias: str, what: str, message: str = "", messages: int = 1) -> Work | None:
    """This thread begins; returns what it does meanwhile no longer, for `end`."""
    thread = threading.get_ident()
    before = _now.get(thread)
    _now[thread] = Work(app, alias, what, message, messages, monotonic())
    return before


def end(before: Work | None) -> None:
    """This thread has ended what it began last, and goes on with what it did before.

    That begins again now: a load that has run many messages is not one run as long as all of them.
    """
    if before is None:
        _now.pop(threading.get_ident(), None)
    else:
        _now[threading.get_ident()] = before._replace(began_at=monotonic())


def lasting(app: str, seconds: float) -> dict[Work, int]:
    """What has been running for this long, each with its thread."""
    before = monotonic() - seconds
    return {work: thread for thread, work in list(_now.items()) if work.app == app and work.began_at <= before}


def running(app: str, alias: str, started_at: float) -> list[dict[str, Any]]:
    """What threads run now for this database, the oldest first and not more than fifty; after a minute, each with its stack.

    An instant is a number of seconds since the process started (`started_at`, monotonic), so that it does not change while the
    thread goes on, and no clock of this host is compared with that of the database.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    now = monotonic()
    found: list[dict[str, Any]] = [
        {
            "what": work.what,
            "message": one_line(work.message),
            "messages": work.messages,
            "thread": names[thread],
            "began": round(work.began_at - started_at, 1),
            **({"stack": stack_of(thread)[-_STACK_LENGTH:]} if now - work.began_at > _STACK_AFTER_SECONDS else {}),
        }
        # A copy: other threads change it. One that has ended without a word, by the end of its process only, is left out.
        for thread, work in list(_now.items())
        if work.app == app and work.alias == alias and thread in names
    ]
    return sorted(found, key=lambda work: work["began"])[:_MOST]
