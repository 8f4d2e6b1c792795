"""Leases in Redis: a successful run writes nothing to the database.

Each message has one hash, see `scripts`. A failed message is stored as an inbox row, with its known steps, and its hash records
that it has a row. A second delivery during a run is also stored as a row, and is checked when the lease has ended. Deliveries
of a message that has a row never run.

Redis may lose data. Each script detects a loss, by an incarnation id that the database also has and by the number of writes
that this process knows of, and then does nothing. After a loss it is unknown whether a message was handled before: it does not
run again automatically.
"""

import hashlib
import json
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from exactly_once.conf.masking import masked
from exactly_once.process.clock import monotonic
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.text import describe
from inbox.conf import InboxOptions
from inbox.contrib.redis_leases import leased_rows, scripts
from inbox.leases.stores import Lease, LeaseStoreUnavailable
from inbox.models import InboxMessage
from inbox.receiving.outcomes import announce_duplicate, fail_stored, store_failure
from inbox.states import Outcome, State
from inbox.store import lease_rows
from inbox.store.message_rows import ConcurrentDuplicate, DuplicateCause, Earlier, Failure, KeyBusy, NewRow
from inbox.transactions.arrival import Arrival
from inbox.transactions.running import DatabaseUnavailable, committed

logger = escaping_logger(__name__)

_SOCKET_SECONDS = 5.0
_LONGEST_WAIT_SECONDS = 2.0
_MAX_TRIES = 3
_MOST_UNANSWERED = 10_000
_HASH_LENGTH = 16
_STEP = "step:"
_DONE, _ENDED = "done", "ended"
_MILLISECONDS = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class _KnownState:
    """A database's record of this Redis: its incarnation, and the time since which its data is complete; None: always."""

    incarnation: str
    since: datetime | None


class _Report(NamedTuple):
    """The last report of Redis: the server process that answered, its number of writes, and its time in milliseconds."""

    server: str = ""
    writes: int = 0
    time: int = 0


class RedisLeases:
    """See `LeaseStore`. The clock is Redis's. Not for Redis Cluster."""

    def __init__(self, options: InboxOptions) -> None:
        self._where = masked(options.LEASE_STORE)
        self._options = options
        self._keep = options.RETENTION
        self._group = options.group
        self._client = redis.Redis.from_url(
            options.LEASE_STORE,
            decode_responses=True,
            socket_connect_timeout=_SOCKET_SECONDS,
            socket_timeout=_SOCKET_SECONDS,
            # Every script is idempotent, so retry at once if Redis has closed the connection; not if it does not answer.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        self._beginning = threading.BoundedSemaphore(max(1, options.CONCURRENCY // 2))
        self._unanswered: OrderedDict[str, str] = OrderedDict()
        self._scripts: dict[str, Any] = {}
        self._states: dict[str, _KnownState] = {}
        self._state_locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._reports: dict[str, _Report] = {}
        self._ahead = 0
        self._eviction_checked = False

    def acquire(self, arrival: Arrival) -> Lease | Outcome | None:
        began_at, record = monotonic(), _record_key(arrival.row)
        # Redis may have granted a lease whose answer was lost, and nothing would hold that lease. The next try takes it over.
        owner = self._unanswered.pop(record, None) or uuid.uuid4().hex
        try:
            answer = self._acquire(arrival, owner)
        except DatabaseUnavailable:
            self._unanswered[record] = owner
            if len(self._unanswered) > _MOST_UNANSWERED:
                with suppress(KeyError):
                    self._unanswered.popitem(last=False)
            raise
        # Not remembered for a failure from here on: it was answered, and a late request to end it would end a run of the next.
        return self._decided(arrival, answer, owner, began_at)

    @contextmanager
    def _half_of_the_threads(self) -> Iterator[None]:
        """No more than half of the threads begin runs at a time: while Redis hangs, the others run handlers without leases."""
        if not self._beginning.acquire(timeout=_LONGEST_WAIT_SECONDS):
            raise LeaseStoreUnavailable(f"the lease store {self._where} has not answered other threads for some time")
        try:
            yield
        finally:
            self._beginning.release()

    def _acquire(self, arrival: Arrival, owner: str) -> list[Any]:
        for _ in range(_MAX_TRIES):
            state = self._state(arrival.handler.using)
            with self._half_of_the_threads():
                # A Redis that hung for longer executes the request when its client has given up, and another process may try.
                answer_by = _now() + self._ahead + _milliseconds(timedelta(seconds=_SOCKET_SECONDS))
                answer = self._run(
                    scripts.ACQUIRE,
                    state,
                    arrival.row,
                    owner,
                    _milliseconds(arrival.terms.duration),
                    _milliseconds(self._keep),
                    *_row_arguments(arrival),
                    int(_may_be_lost(arrival, state)),
                    arrival.row.digest[:_HASH_LENGTH],
                    _short_hash(arrival.row.message_id),
                    arrival.row.handler,
                    arrival.row.cause.value,
                    answer_by,
                )
            if answer[0] not in {"lost", "late"}:
                return answer
        raise LeaseStoreUnavailable(f"the lease store {self._where} lost data, or answered late, {_MAX_TRIES} times in a row")

    def extend(self, lease: Lease, by: timedelta, *, stopping: bool = False) -> bool:
        arrival, extend = lease.arrival, partial(self._as_owner, scripts.EXTEND, lease, _milliseconds(by), int(stopping))
        (answer,) = extend(0)
        # A row that a duplicate has stored meanwhile has no fence yet.
        fence = 0 if lease.pk is None else lease.fence
        may_renew = answer == _ENDED and not arrival.exclusive_key
        if may_renew and committed(arrival.handler.using, leased_rows.may_renew, arrival.row, fence):
            (answer,) = extend(1)
        extended = answer == _DONE
        if extended and stopping and lease.pk is not None:
            committed(lease.arrival.handler.using, leased_rows.show_stopping, lease.pk)
        return bool(extended)

    def remember(self, lease: Lease, step: str, result: str | None) -> bool:
        return bool(self._as_owner(scripts.REMEMBER, lease, step, result or "")[0] == _DONE)

    def consume(self, lease: Lease, following: Arrival | None = None) -> bool:
        answer, *has_row = self._as_owner(scripts.CONSUME, lease, lease.arrival.row.handler)
        if answer == _DONE and has_row == ["1"]:
            arrival = lease.arrival
            delivered = arrival.stored is None
            committed(arrival.handler.using, leased_rows.finish_external, arrival.row, arrival.order, delivered=delivered)
        return bool(answer == _DONE)

    def free(self, lease: Lease, failure: Failure) -> bool:
        if self._as_owner(scripts.FREE, lease, failure.attempts)[0] != _DONE:
            return False
        arrival = lease.arrival
        lease.pk = committed(
            arrival.handler.using,
            leased_rows.fail_external,
            arrival.row,
            failure,
            fence=lease.fence,
            steps=lease.steps,
            duplicate_timeout=self._options.DUPLICATE_TIMEOUT,
            leaves=arrival.leaves(failure),
        )
        return True

    def forget(self, lease: Lease, step: str) -> None:
        self._as_owner(scripts.FORGET, lease, step)
        if lease.pk is not None:
            committed(lease.arrival.handler.using, lease_rows.forget_begun, lease.pk, lease.fence, step)

    def leave(self, lease: Lease) -> None:
        if lease.pk is None:
            self._store_external(lease.arrival, timedelta(), lease.attempt)

    def is_held(self, alias: str, row: NewRow) -> bool:
        for _ in range(_MAX_TRIES):
            (answer,) = self._run(scripts.HELD, self._state(alias), row)
            if answer != "lost":
                return bool(answer == "held")
        raise LeaseStoreUnavailable(f"the lease store {self._where} lost data {_MAX_TRIES} times in a row")

    def counts(self) -> dict[str, dict[str, int]]:
        """By handler, messages without a row: `handled`, their `duplicates` by cause, and `conflicts`.

        Raises:
            LeaseStoreUnavailable: Redis does not answer.
        """
        counted: dict[str, dict[str, int]] = {}
        with self._errors_as_unavailable():
            found: Any = self._client.hgetall(self._key("counts"))
        for name, count in found.items():
            what, _, handler = name.partition(":")
            counted.setdefault(handler, {})[what] = int(count)
        return counted

    # -------------------------------------------------------------------------------------------------------- calls of Redis

    def _decided(self, arrival: Arrival, answer: list[Any], owner: str, began_at: float) -> Lease | Outcome | None:
        match answer:
            case ["lease", fence, attempt, fields]:
                named = zip(fields[::2], fields[1::2], strict=True)
                steps = {name.removeprefix(_STEP): value or None for name, value in named if name.startswith(_STEP)}
                lease = Lease(
                    store=self,
                    arrival=arrival,
                    terms=arrival.terms,
                    fence=fence,
                    attempt=attempt,
                    owner=owner,
                    began_at=began_at,
                    steps=steps,
                )
                return self._mark_row(lease, arrival.stored) if arrival.stored else lease
            case ["consumed", same, differs]:
                return self._consumed(arrival, _cause(arrival, same), conflicting=bool(differs))
            case ["held", same, differs, milliseconds, attempts, stopping]:
                held = {"duplicate": _cause(arrival, same), "conflicting": bool(differs), "stopping": stopping == "1"}
                return self._held(arrival, int(milliseconds) * _MILLISECONDS, int(attempts), held)
            case ["history lost"]:
                return self._history_lost(arrival)
        return None

    def _consumed(self, arrival: Arrival, cause: DuplicateCause, *, conflicting: bool) -> Outcome:
        """It has been handled before. Redis has counted a delivery as its duplicate."""
        if arrival.stored is None:
            _announce_duplicate(arrival, cause, conflicting=conflicting)
        else:
            committed(arrival.handler.using, leased_rows.finish_external, arrival.row, arrival.order, uncounted=1)
        return Outcome.DUPLICATE

    def _held(self, arrival: Arrival, remaining: timedelta, attempts: int, held: Mapping[str, Any]) -> Outcome | None:
        """Another owner runs it now: a row is stored or deferred, for a runner to check when that lease ends."""
        if arrival.stored is not None:
            committed(arrival.handler.using, leased_rows.defer_to_lease_end, arrival.stored, remaining)
            return Outcome.STORED
        if not self._store_external(arrival, remaining, attempts, **held):
            return None
        _announce_duplicate(arrival, held["duplicate"], conflicting=held["conflicting"])
        return Outcome.STORED

    def _history_lost(self, arrival: Arrival) -> Outcome:
        handler, stored = arrival.handler, arrival.stored
        attempts = 0 if stored is None else stored.attempts - 1
        error = (
            f"The lease store {self._where} has lost data since this message was created, so it is unknown whether the message "
            "has been run. Check that. If it has not been run, override the maximum message age; otherwise skip it."
        )
        failure = Failure(error=error, retry_after=None, attempts=attempts, quarantined=True)
        if stored is None:
            return store_failure(handler, arrival.row, failure, self._options)
        return fail_stored(handler, stored, failure)

    def _store_external(self, arrival: Arrival, until: timedelta, attempts: int, **held: Any) -> bool:
        """Store a message that a runner checks when the lease of its owner ends. False: it has a row."""
        alias, longest_wait = arrival.handler.using, self._options.DUPLICATE_TIMEOUT
        return committed(alias, leased_rows.store_external, arrival.row, longest_wait, until=until, attempts=attempts, **held)

    def _mark_row(self, lease: Lease, stored: InboxMessage) -> Lease | None:
        alias, pk = lease.arrival.handler.using, stored.pk
        lease.pk = pk
        duration, exclusive_key = lease.arrival.terms.duration, lease.arrival.exclusive_key
        try:
            if stored.fence > 1:
                lease.steps = committed(alias, lease_rows.steps_of, pk) | lease.steps
            if committed(alias, lease_rows.lease_stored, stored, duration, exclusive_key, fence=lease.fence):
                return lease
        except (KeyBusy, ConcurrentDuplicate, DatabaseUnavailable):
            self._as_owner(scripts.FREE, lease, lease.attempt - 1)
            raise
        self._as_owner(scripts.FREE, lease, lease.attempt - 1)
        return None

    def _as_owner(self, script: str, lease: Lease, *arguments: object) -> list[Any]:
        arrival, keep = lease.arrival, _milliseconds(self._keep)
        return self._run(script, self._state(arrival.handler.using), arrival.row, lease.owner, lease.fence, keep, *arguments)

    def _run(self, script: str, state: _KnownState, row: NewRow, *arguments: object) -> list[Any]:
        """The script's answer, without its report. After "lost", the state is read again."""
        keys = [self._key("state"), self._key(_record_key(row)), self._key("counts")]
        reported = self._reports.get(state.incarnation, _Report())
        answer, report, *more = self._call(script, keys, [state.incarnation, *reported[:2], *arguments])
        if answer != "lost":
            self._store_report(state.incarnation, self._read_report(report))
        else:
            with self._lock:
                self._states = {alias: known for alias, known in self._states.items() if known != state}
        return [answer, *more]

    def _read_report(self, report: list[Any]) -> _Report:
        read = _Report(*report)
        # Too little by the time that the answer took, so that a request is never granted too late.
        self._ahead = read.time - _now()
        return read

    def _store_report(self, incarnation: str, report: _Report) -> None:
        with self._lock:
            before = self._reports.get(incarnation, report)
            # Another thread may have a later report of the same server.
            self._reports[incarnation] = max(before, report) if before.server == report.server else report
        if before.server and before.server != report.server:
            logger.warning(
                "lease store %s: another Redis process answers (%s, before %s), after a restart or a failover. It has all data "
                "that this process knows of; leases continue.",
                self._where,
                report.server,
                before.server,
            )

    def _call(self, script: str, keys: list[str], arguments: list[Any]) -> list[Any]:
        if script not in self._scripts:
            self._scripts[script] = self._client.register_script(script)
        with self._errors_as_unavailable():
            answer: list[Any] = self._scripts[script](keys, arguments)
        return answer

    @contextmanager
    def _errors_as_unavailable(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise LeaseStoreUnavailable(f"the lease store {self._where}: {describe(error)}") from error

    def _key(self, name: str) -> str:
        return f"inbox:{self._group}:{name}"

    # ---------------------------------------------------------------------------------------------------- detection of losses

    def _state(self, alias: str) -> _KnownState:
        known = self._states.get(alias)
        if known is None:
            # One lock for each database: if one is unavailable, the leases of the others must still be extended.
            reading = self._state_locks.setdefault(alias, threading.Lock())
            if not reading.acquire(timeout=_LONGEST_WAIT_SECONDS):
                raise LeaseStoreUnavailable(f"the state of the lease store {self._where} is being read by another thread")
            try:
                known = self._states.get(alias) or self._read_state(alias)
                with self._lock:
                    self._states[alias] = known
            finally:
                reading.release()
        return known

    def _read_state(self, alias: str) -> _KnownState:
        self._check_eviction()
        name = self._key("leases")
        for _ in range(_MAX_TRIES):
            found, report = self._call(scripts.READ_INCARNATION, [self._key("state")], [uuid.uuid4().hex])
            known, since = committed(alias, leased_rows.recorded_incarnation, name, found)
            if known == found:
                with self._lock:
                    # An earlier report stays: it may show a loss.
                    self._reports.setdefault(found, self._read_report(report))
                return _KnownState(known, since)
            if committed(alias, leased_rows.record_loss, name, known=known, found=found):
                logger.error(
                    "lease store %s: Redis has lost data. Messages that were created before now and have no row in the "
                    "database become dead letters when they are delivered again. Check whether each has been "
                    "run; then override or skip it.",
                    self._where,
                )
        raise LeaseStoreUnavailable(f"the lease store {self._where} lost data {_MAX_TRIES} times in a row")

    def _check_eviction(self) -> None:
        if self._eviction_checked:
            return
        with self._errors_as_unavailable():
            try:
                answer: Any = self._client.info("memory")
            except redis.ResponseError:
                # The user may have no permission for INFO.
                answer = {}
        self._eviction_checked = True
        if answer.get("maxmemory") and answer.get("maxmemory_policy") != "noeviction":
            logger.error(
                "lease store %s: Redis deletes records when its memory is full, because its maxmemory-policy is %s. A message "
                "whose record was deleted runs again when it is delivered again. Set the policy to noeviction.",
                self._where,
                answer.get("maxmemory_policy"),
            )


def _now() -> int:
    return int(monotonic() * 1000)


def _may_be_lost(arrival: Arrival, state: _KnownState) -> bool:
    """May Redis have lost the record of this message?"""
    if arrival.stored is not None and not arrival.row.redelivered:
        # The database has the steps of a failed message. Only Redis has the steps of a running one.
        return arrival.stored.state == State.RUNNING
    if state.since is None:
        return False
    return arrival.row.redelivered if arrival.envelope.sent_at is None else arrival.envelope.sent_at < state.since


def _cause(arrival: Arrival, same: int) -> DuplicateCause:
    return arrival.row.cause if same else DuplicateCause.BUSINESS


def _announce_duplicate(arrival: Arrival, cause: DuplicateCause, *, conflicting: bool) -> None:
    announce_duplicate(arrival.handler, arrival.row, Earlier(0, State.DONE, cause, conflicting=conflicting))


def _row_arguments(arrival: Arrival) -> tuple[int, int, int]:
    # The claim has incremented the row's fence, and the lease has the same.
    return (0, 0, 0) if arrival.stored is None else (1, arrival.stored.attempts, arrival.stored.fence - 1)


def _record_key(row: NewRow) -> str:
    # Hashed, because names may be long and contain any character.
    return hashlib.sha256(json.dumps([row.handler, row.topic, row.biz_id]).encode()).hexdigest()[:32]


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH] if text else ""


def _milliseconds(duration: timedelta) -> int:
    return max(int(duration / _MILLISECONDS), 1)
