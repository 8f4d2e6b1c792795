"""Receivers of signals, connected for a block."""

from contextlib import ExitStack, contextmanager
from functools import partial

from inbox import signals

ALL = [name for name, signal in vars(signals).items() if isinstance(signal, signals.Signal)]


@contextmanager
def listening(signal, receiver):
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


@contextmanager
def recorded_signals(*names, of=signals):
    """The signals of these names, by default all of the inbox, that are sent inside the block, in order: (name, arguments)."""
    sent = []

    def record(name, sender, signal, **arguments):
        sent.append((name, arguments))

    with ExitStack() as stack:
        for name in names or ALL:
            stack.enter_context(listening(getattr(of, name), partial(record, name)))
        yield sent
