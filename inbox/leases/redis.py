"""Leases in Redis: a successful run writes nothing to the database.

Each message has one hash, see `scripts`. A failed message is stored as an inbox row, with its known steps, and its record says
that it has a row. So does the record of a message with a second delivery during its run: that delivery is stored, too, and
checked again when the lease has ended. Deliveries of a message that has a row never run.

Redis may lose data. Each script checks for a loss (an incarnation mark that the database also has, and the number of writes
that this process has seen, by server) and does nothing after one. Whether a message was handled before the loss is then
unknown: it does not run again automatically.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from inbox.conf import InboxOptions
from inbox.leases import scripts
from inbox.leases.stores import Consumed, Forgotten, Held, Kept, Lease, LeaseStoreUnavailable, Verdict, Wanted
from inbox.models import InboxMessage, State
from inbox.store import leases
from inbox.store import steps as steps_table
from inbox.store.arrivals import cause_if_the_same
from inbox.store.rows import ConcurrentDuplicate, DuplicateCause, Failure, KeyBusy, NewRow
from inbox.transactions.persistence import DatabaseUnavailable, committed
from outbox.kernel.clock import monotonic
from outbox.kernel.masking import masked
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

_SOCKET_SECONDS = 5.0
_OPENINGS = 3
_SHORT = 16
_STEP = "step:"
_DONE = "done"
_MILLISECONDS = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class _Memory:
    """A database's record of this Redis: its mark, and the time since which its data is complete; None: always."""

    incarnation: str
    since: datetime | None


class _Heard(NamedTuple):
    """The last report of Redis: the server process that answered, and the number of writes it had seen."""

    server: str = ""
    writes: int = 0


class RedisLeases:
    """See `LeaseStore`. The clock is Redis's. Not for Redis Cluster."""

    def __init__(self, options: InboxOptions) -> None:
        self._where = masked(options.LEASE_STORE)
        self._keep = options.RETENTION
        self._duplicate_timeout = options.DUPLICATE_TIMEOUT
        self._group = options.group
        self._client = redis.Redis.from_url(
            options.LEASE_STORE,
            decode_responses=True,
            socket_connect_timeout=_SOCKET_SECONDS,
            socket_timeout=_SOCKET_SECONDS,
            # Every script is idempotent, so retry at once if Redis has closed the connection.
            retry=Retry(NoBackoff(), 1),
        )
        self._scripts: dict[str, Any] = {}
        self._memories: dict[str, _Memory] = {}
        self._opening: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._heard: dict[str, _Heard] = {}
        self._told_of_eviction = False

    def acquire(self, wanted: Wanted, *, duplicate_timeout: timedelta) -> Verdict:
        began_at, owner = monotonic(), uuid.uuid4().hex
        for _ in range(_OPENINGS):
            memory = self._memory(wanted.handler.using)
            answer = self._run(
                scripts.ACQUIRE,
                memory.incarnation,
                wanted.row,
                owner,
                _milliseconds(wanted.terms.duration),
                _milliseconds(self._keep),
                *_of_the_row(wanted),
                int(_is_doubtful(wanted, memory)),
                wanted.row.digest[:_SHORT],
                _short(wanted.row.message_id),
                wanted.row.handler,
                cause_if_the_same(wanted.row, redelivered=wanted.redelivered).value,
            )
            if answer[0] != "lost":
                return self._verdict(wanted, answer, owner, began_at)
            self._reopen(memory)
        raise LeaseStoreUnavailable(f"the lease store {self._where} keeps losing its memory")

    def extend(self, lease: Lease, by: timedelta) -> bool:
        return bool(self._ours(scripts.EXTEND, lease, _milliseconds(by))[0] == _DONE)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        return bool(self._ours(scripts.REMEMBER, lease, step, result or "")[0] == _DONE)

    def consume(self, lease: Lease) -> bool:
        said, *has_row = self._ours(scripts.CONSUME, lease, lease.wanted.row.handler)
        if said == _DONE and has_row == ["1"]:
            wanted = lease.wanted
            finish = partial(leases.finish_kept, wanted.handler.using, wanted.row, wanted.order)
            committed(partial(finish, delivered=wanted.stored is None), wanted.handler.using)
        return bool(said == _DONE)

    def free(self, lease: Lease, failure: Failure) -> bool:
        if self._ours(scripts.FREE, lease, failure.attempts)[0] != _DONE:
            return False
        wanted = lease.wanted
        store_it = partial(
            leases.fail_kept,
            wanted.handler.using,
            wanted.row,
            failure,
            fence=lease.fence,
            steps=lease.steps,
            duplicate_timeout=self._duplicate_timeout,
            leaves=wanted.leaves(failure),
        )
        lease.pk = committed(store_it, wanted.handler.using)
        return True

    def forget(self, lease: Lease, step: str) -> None:
        self._ours(scripts.FORGET, lease, step)
        alias, pk = lease.wanted.handler.using, lease.pk
        if pk is not None:
            committed(lambda: steps_table.forget_begun(alias, pk, lease.fence, step), alias)

    def is_held(self, alias: str, row: NewRow) -> bool:
        for _ in range(_OPENINGS):
            memory = self._memory(alias)
            (said,) = self._run(scripts.HELD, memory.incarnation, row)
            if said != "lost":
                return bool(said == "held")
            self._reopen(memory)
        raise LeaseStoreUnavailable(f"the lease store {self._where} keeps losing its memory")

    def counts(self) -> dict[str, dict[str, int]]:
        """By handler, messages without a row: `handled`, their `duplicates` by cause, and `conflicts`.

        Raises:
            LeaseStoreUnavailable: Redis does not answer.
        """
        counted: dict[str, dict[str, int]] = {}
        with self._asking():
            told: Any = self._client.hgetall(self._key("counts"))
        for name, count in told.items():
            what, _, handler = name.partition(":")
            counted.setdefault(handler, {})[what] = int(count)
        return counted

    # ---------------------------------------------------------------------------------------------------------- asking Redis

    def _verdict(self, wanted: Wanted, answer: list[Any], owner: str, began_at: float) -> Verdict:
        match answer:
            case ["lease", fence, attempt, fields]:
                steps = {name.removeprefix(_STEP): value or None for name, value in _pairs(fields) if name.startswith(_STEP)}
                lease = Lease(wanted=wanted, fence=fence, attempt=attempt, owner=owner, began_at=began_at, steps=steps)
                return self._on_its_row(lease, wanted.stored) if wanted.stored else lease
            case ["consumed", same, differs]:
                return Consumed(counted=wanted.stored is None, cause=_cause(wanted, same), conflicting=bool(differs))
            case ["held", same, differs, milliseconds, attempts]:
                return Held(int(milliseconds) * _MILLISECONDS, int(attempts), _cause(wanted, same), conflicting=bool(differs))
            case ["forgotten"]:
                return Forgotten(_forgotten(self._where))
        return Kept()

    def _on_its_row(self, lease: Lease, stored: InboxMessage) -> Verdict:
        alias, pk = lease.wanted.handler.using, stored.pk
        lease.pk = pk
        claimed = (alias, pk, stored.attempts, lease.fence, lease.wanted.terms.duration, lease.wanted.alone_in)
        show = partial(leases.show_running, *claimed, was=stored.state)
        try:
            if stored.fence:
                lease.steps = committed(partial(steps_table.steps_of, alias, pk), alias) | lease.steps
            if committed(show, alias):
                return lease
        except (KeyBusy, ConcurrentDuplicate, DatabaseUnavailable):
            self._ours(scripts.FREE, lease, lease.attempt - 1)
            raise
        self._ours(scripts.FREE, lease, lease.attempt - 1)
        return Kept()

    def _ours(self, script: str, lease: Lease, *arguments: object) -> list[Any]:
        memory = self._memory(lease.wanted.handler.using)
        keep = _milliseconds(self._keep)
        answer = self._run(script, memory.incarnation, lease.wanted.row, lease.owner, lease.fence, keep, *arguments)
        if answer[0] == "lost":
            self._reopen(memory)
        return answer

    def _run(self, script: str, incarnation: str, row: NewRow, *arguments: object) -> list[Any]:
        """The script's answer, without its report of Redis."""
        keys = [self._key("memory"), self._key(_record_of(row)), self._key("counts")]
        said, told, *more = self._call(script, keys, [incarnation, *self._heard_of(incarnation), *arguments])
        if said != "lost":
            self._hear(incarnation, _Heard(*told))
        return [said, *more]

    def _heard_of(self, incarnation: str) -> _Heard:
        return self._heard.get(incarnation, _Heard())

    def _hear(self, incarnation: str, told: _Heard) -> None:
        with self._lock:
            before = self._heard.get(incarnation, told)
            # Another thread may have a later report of the same server.
            self._heard[incarnation] = max(before, told) if before.server == told.server else told
        if before.server and before.server != told.server:
            logger.warning(
                "The lease store %s was restarted, or a replica took over: another Redis process answers (%s, before %s). "
                "It has everything that this process had heard of.",
                self._where,
                told.server,
                before.server,
            )

    def _call(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        with self._asking():
            answer: list[Any] = self._scripts[script](keys, arguments)
        return answer

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise LeaseStoreUnavailable(f"the lease store {self._where}: {describe(error)}") from error

    def _key(self, name: str) -> str:
        return f"inbox:{self._group}:{name}"

    # ------------------------------------------------------------------------------------------------------------- its memory

    def _memory(self, alias: str) -> _Memory:
        known = self._memories.get(alias)
        if known is None:
            # One lock for each database: if one does not answer, the leases of the others must still be extended.
            with self._opening.setdefault(alias, threading.Lock()):
                known = self._memories.get(alias) or self._open(alias)
                with self._lock:
                    self._memories[alias] = known
        return known

    def _open(self, alias: str) -> _Memory:
        self._warn_of_eviction()
        name = self._key("leases")
        for _ in range(_OPENINGS):
            found, told = self._call(scripts.REMEMBERS, [self._key("memory")], [uuid.uuid4().hex])
            known, since = committed(lambda: leases.memory_of(alias, name, found), alias)  # noqa: B023 - called at once
            if known == found:
                with self._lock:
                    # An earlier report stays: it may show a loss.
                    self._heard.setdefault(found, _Heard(*told))
                return _Memory(known, since)
            if committed(lambda: leases.record_loss(alias, name, known=known, found=found), alias):  # noqa: B023
                logger.error(
                    "The lease store %s has lost its memory. Messages that were created before now, and that the database has "
                    "no row of, become dead letters instead of being run again; find out about each, then override or skip it.",
                    self._where,
                )
        raise LeaseStoreUnavailable(f"the lease store {self._where} keeps losing its memory")

    def _reopen(self, memory: _Memory) -> None:
        heard = self._heard_of(memory.incarnation)
        self._call(scripts.BREAK, [self._key("memory")], [memory.incarnation, *heard, uuid.uuid4().hex])
        with self._lock:
            self._memories = {alias: known for alias, known in self._memories.items() if known != memory}

    def _warn_of_eviction(self) -> None:
        if self._told_of_eviction:
            return
        with self._asking():
            try:
                said: Any = self._client.info("memory")
            except redis.ResponseError:
                # The user may lack the right to INFO.
                said = {}
        self._told_of_eviction = True
        if said.get("maxmemory") and said.get("maxmemory_policy") != "noeviction":
            logger.error(
                "The lease store %s may throw records away when its memory is full: its maxmemory-policy is %s. A message "
                "whose record is gone runs again when it comes again. Set it to noeviction.",
                self._where,
                said.get("maxmemory_policy"),
            )


def _is_doubtful(wanted: Wanted, memory: _Memory) -> bool:
    """Might a missing record be one that Redis has lost?"""
    if wanted.stored is not None:
        # The database has a failed message's steps. Only Redis has those of a running one.
        return wanted.stored.state == State.RUNNING
    if memory.since is None:
        return False
    return wanted.redelivered if wanted.sent_at is None else wanted.sent_at < memory.since


def _cause(wanted: Wanted, same: int) -> DuplicateCause:
    return cause_if_the_same(wanted.row, redelivered=wanted.redelivered) if same else DuplicateCause.BUSINESS


def _forgotten(where: str) -> str:
    return (
        f"The lease store {where} has lost its memory since this message was created: whether it has been run can no longer be "
        "known. Once you know that it has not, override this; else skip it."
    )


def _of_the_row(wanted: Wanted) -> tuple[int, int, int]:
    return (0, 0, 0) if wanted.stored is None else (1, wanted.stored.attempts, wanted.stored.fence)


def _record_of(row: NewRow) -> str:
    # Hashed, because names may be long and contain any character.
    return hashlib.sha256(json.dumps([row.handler, row.topic, row.biz_id]).encode()).hexdigest()[:32]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT] if text else ""


def _milliseconds(span: timedelta) -> int:
    return max(int(span / _MILLISECONDS), 1)


def _pairs(flat: list[str]) -> list[tuple[str, str]]:
    return list(zip(flat[::2], flat[1::2], strict=True))
