"""What an operator may ask of a running process, and what the process then does.

The request is in the row of the process's heartbeat. The process reads it with its next heartbeat, carries it out and
acknowledges it in the row, so an operator needs access to the database only, not to the host. The row is read and written
anyway, so a request costs no further query.

A signal would need access to the host, and the process id inside a container. A NOTIFY is lost if the process does not listen
at that moment, and SQLite has none. A message through the broker would not arrive while the broker is unavailable.
"""

from __future__ import annotations

from enum import StrEnum


class Request(StrEnum):
    """A request to one process."""

    PAUSE = "pause"
    """Begin no work; finish what is in hand."""
    RESUME = "resume"
    """Work again."""
    DRAIN = "drain"
    """Finish what is due, then end."""
    STOP = "stop"
    """End as after SIGTERM: finish what is in hand only."""


class Mode(StrEnum):
    """What a process does."""

    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPING = "stopping"


ALLOWED_IN = {
    Request.PAUSE: (Mode.RUNNING,),
    Request.RESUME: (Mode.PAUSED,),
    Request.DRAIN: (Mode.RUNNING, Mode.PAUSED),
    Request.STOP: (Mode.RUNNING, Mode.PAUSED, Mode.DRAINING),
}
"""By request: the modes of a process in which it has an effect. A process that drains or stops does not work again."""
