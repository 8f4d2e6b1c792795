"""Actors of the model checks: threads that stop before and after each step of the product until a schedule resumes them."""

import threading
from contextlib import contextmanager, suppress

import pytest
from django.db import DatabaseError, InterfaceError, connection, connections


class Killed(BaseException):
    """The process of this actor has ended."""


class Actor:
    """A thread with connections of its own that goes from gate to gate when the machine resumes it."""

    here = threading.local()
    seconds = 60.0
    """How long it may take from one gate to the next."""

    def __init__(self, machine):
        self.machine = machine
        self.gate = ""
        self.error = None
        self.killed = self._ended = False
        self._go, self._came = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._came.acquire(timeout=self.seconds)

    @property
    def is_idle(self):
        return self.gate == "idle"

    def goes_on(self):
        self._go.release()
        self._arrives()

    def dies(self):
        self.killed = True
        self.goes_on()

    def ends(self):
        self._ended = True
        self._go.release()
        self._thread.join(self.seconds)
        assert not self._thread.is_alive(), self._hangs()

    def stop_at(self, gate):
        self.gate = gate
        self._came.release()
        self._go.acquire()
        if self.killed:
            with suppress(DatabaseError, InterfaceError, AttributeError):
                connection.connection.close()  # what the server sees of a kill
            raise Killed

    def works(self):
        """From its first gate to its end."""
        raise NotImplementedError

    def _arrives(self):
        assert self._came.acquire(timeout=self.seconds), self._hangs()
        self._raise_its_error()

    def _raise_its_error(self):
        if self.error is not None:
            raise self.error

    def _hangs(self):
        return f"an actor hangs after {self.gate!r}; {self.machine}"

    def _run(self):
        self.here.actor = self
        try:
            self.works()
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self.error = error
        finally:
            connections.close_all()
            self._came.release()


def this_actor():
    return getattr(Actor.here, "actor", None)


@contextmanager
def gates(functions, only_after=()):
    """Every actor stops before and after each of these functions, given by module and name."""

    def gated(name, original):
        def function(*args, **kwargs):
            actor = this_actor()
            if actor and name not in only_after:
                actor.stop_at(f"before {name}")
            result = original(*args, **kwargs)
            if actor:
                actor.stop_at(f"after {name}")
            return result

        return function

    with pytest.MonkeyPatch.context() as patch:
        for module, name in functions:
            patch.setattr(module, name, gated(name, getattr(module, name)))
        yield
