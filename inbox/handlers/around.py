"""The context managers of `INBOX["AROUND"]`, entered around each call of a handler: for tenants, tracing, log contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inbox.handlers.message import Message


def called_around(hooks: Sequence[Callable[..., Any]], messages: Sequence[Message], call: Callable[[], object]) -> object:
    """`call()`, within a context manager of each hook for each message, in the order of the setting.

    An exception of a hook is raised as one of the handler. A hook cannot suppress the handler's exception, because the effect
    would be committed.
    """
    raised: list[BaseException] = []
    with ExitStack() as stack:
        try:
            for hook in hooks:
                for message in messages:
                    stack.enter_context(_entered(hook, message))
            return call()
        except BaseException as error:
            raised.append(error)
            raise
    raise raised[0]  # a hook has suppressed it


def _entered(hook: Callable[..., Any], message: Message) -> Any:
    manager = hook(message)
    if not (hasattr(manager, "__enter__") and hasattr(manager, "__exit__")):
        raise TypeError(
            f"INBOX['AROUND']: {hook.__module__}.{getattr(hook, '__qualname__', hook)} returned {manager!r}: it must return a "
            "context manager. Decorate it with @contextlib.contextmanager."
        )
    return manager
