"""The life of messages from end to end, in the project that DJANGO_SETTINGS_MODULE names: `python -m tests.projects.cycle`.

Commands are processes of their own, forked from one that has set up Django and opened no connection. The module of the settings
may say more about the project, in names that Django ignores:

    before = "CREATE PUBLICATION …"     SQL for the empty database
    tenants = ("blue", "red")           schemas of `django_tenants`, which share one outbox and one inbox
    using = "main"                      the alias of the database with the messages, which the routers name
    broker = True                       RabbitMQ and a consumer, in place of `local://`
    service = "billing"                 the first part of the names of topic and handler
    server = ("gunicorn", …)            the command of a web server, a module and its arguments, in whose requests messages are
                                        published and pages opened
    says = "gives no life sign"         each relay and consumer warns once so
    def after(): …                      called when everything is published
    def beside(): …                     called when everything is handled; it replays everything
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from io import StringIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import django

PROJECT = import_module(os.environ["DJANGO_SETTINGS_MODULE"])
USING: str = getattr(PROJECT, "using", "default")
TENANTS: tuple[str, ...] = getattr(PROJECT, "tenants", ())
TOPIC = f"{getattr(PROJECT, 'service', 'projects')}.order"
HANDLER = f"{TOPIC}.book"
SERVER: tuple[str, ...] = getattr(PROJECT, "server", ())
SAYS = getattr(PROJECT, "says", "")
COMMANDS = (
    *(["exactly_once_status"], ["exactly_once_status", "--json"], ["exactly_once_processes", "--all"]),
    *(["exactly_once_alerts", "--once"], ["exactly_once_export"], ["exactly_once_roles"]),
    *(["exactly_once_trail", "--topic", TOPIC, "--biz-id", f"{(*TENANTS, '')[0]}fails once"],),
    *(["outbox_pause", TOPIC], ["outbox_resume", TOPIC]),
    *(["inbox_pause", HANDLER], ["inbox_resume", HANDLER]),
    *(["outbox_replay", "--all", "--yes"], ["outbox_restore", "--all", "--state", "retrying"]),
)
LONGEST_SECONDS = 60
ADDRESS = r"http://[\d.]+:\d+"
Get = Callable[[str], tuple[int, bytes]]
"""The status and body of the page with this path."""
FILTERS_OF_THEMES = (b'id="changelist-filter"', b'id="grp-filters"', b"search-filter")
WITH_FILTERS = re.compile(r"/(outboxmessage|inboxmessage|process)/$")


@functools.cache
def commander() -> Connection:
    """Takes the arguments of a command, and returns its exit status and what it has printed."""
    ours, theirs = Pipe()
    if not os.fork():
        ours.close()
        fork_commands(theirs)
    theirs.close()
    return ours


def run(*arguments: str) -> None:
    """Run a command as a process; what it prints is shown if it fails."""
    commander().send(arguments)
    status, said = commander().recv()
    assert not status, f"{' '.join(arguments)}: exit status {status}\n{said}"
    assert "Traceback" not in said, f"{' '.join(arguments)}:\n{said}"
    if SAYS and arguments[0] == "outbox_relay":
        assert said.count(SAYS) == 1, said


def fork_commands(requests: Connection) -> NoReturn:
    while True:
        try:
            arguments = requests.recv()
        except EOFError:  # the main process has ended
            os._exit(0)
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            execute(arguments)
        os.close(writing)
        with os.fdopen(reading) as output:
            said = output.read()
        requests.send((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said))


def execute(arguments: tuple[str, ...]) -> NoReturn:
    from django.core.management import execute_from_command_line

    signal.alarm(2 * LONGEST_SECONDS)
    status = 1
    try:
        execute_from_command_line(["manage.py", *arguments])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


@contextlib.contextmanager
def running(*command: str, until: str, never: str = "Traceback", status: int | None = None) -> Iterator[list[str]]:
    """A process, from when a line of it matches; yields its lines, which are complete at the end."""
    words = [sys.executable, "-m", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if re.search(until, line):
                break
        try:
            yield said
        finally:
            process.terminate()
            said.append(process.communicate(timeout=60)[0])
    assert status in {None, process.returncode}, "".join(said)
    assert not re.search(never, "".join(said)), "".join(said)


@contextlib.contextmanager
def consuming() -> Iterator[None]:
    """While a consumer runs, which has declared its queues; with `local://` a relay runs the handlers."""
    if not getattr(PROJECT, "broker", False):
        yield
        return
    with running("django", "inbox_consume", until="receiving from", status=0) as said:
        yield
    assert not SAYS or "".join(said).count(SAYS) == 1, "".join(said)


@contextlib.contextmanager
def browsing() -> Iterator[Get]:
    """A function that opens a page as a superuser: of the project's web server, which runs meanwhile, or of Django's client."""
    from django.contrib import auth
    from django.test import Client

    client = Client(HTTP_HOST=getattr(PROJECT, "host", "localhost"))
    user = auth.get_user_model().objects.create_superuser(**getattr(PROJECT, "superuser", {"username": "admin"}))
    client.force_login(user)
    if not SERVER:

        def get(path: str) -> tuple[int, bytes]:
            answer = client.get(path, follow=True)
            return answer.status_code, b"".join(answer)

        yield get
        return
    headers = {"Cookie": "; ".join(f"{name}={cookie.value}" for name, cookie in client.cookies.items())}
    with running(*SERVER, until=ADDRESS, never="Traceback|Warning") as said:
        address = re.search(ADDRESS, "".join(said))

        def get(path: str) -> tuple[int, bytes]:
            assert address, "".join(said)
            try:
                answer = urlopen(Request(address[0] + path, headers=headers), timeout=60)
            except HTTPError as error:
                answer = error
            with answer:
                return answer.status, answer.read()

        yield get


def create() -> None:
    from django.db import connections

    if before := getattr(PROJECT, "before", ""):
        with connections[USING].cursor() as cursor:
            cursor.execute(before)
    if TENANTS:
        run("migrate_schemas", "--shared", "--verbosity", "0")
        for tenant in ("public", *TENANTS):
            create_tenant(tenant)
    else:
        for alias in connections:
            if connections[alias].settings_dict["ENGINE"] != "django.db.backends.dummy":
                run("migrate", "--verbosity", "0", "--database", alias)
    run("check", "--database", USING)


def create_tenant(name: str) -> None:
    from django_tenants.utils import get_tenant_domain_model, get_tenant_model

    tenant = get_tenant_model()(schema_name=name, name=name)
    tenant.save(verbosity=0)
    get_tenant_domain_model()(domain=f"{name}.localhost", tenant=tenant, is_primary=True).save()


@contextlib.contextmanager
def at_home(tenant: str) -> Iterator[None]:
    if not tenant:
        yield
        return
    from django_tenants.utils import schema_context

    with schema_context(tenant):
        yield


@contextlib.contextmanager
def a_request() -> Iterator[None]:
    """What Django does with its connections around a request: some go back to their pool."""
    from django.core import signals

    signals.request_started.send(None)
    yield
    signals.request_finished.send(None)


def write(tenant: str) -> None:
    """Publish in every way, on one connection: the sixth publish of a session takes another way than the first."""
    from django.db import transaction

    from outbox import Draft, cancel, prepare, publish, publish_many, reschedule

    def send(name: str, payload: str = "", **options: Any) -> None:
        publish(TOPIC, payload, biz_id=f"{tenant}{name}", **options)

    for number in range(20):
        with transaction.atomic(using=USING):
            transaction.get_connection(USING).savepoint()
            send(f"plain {number}", key=f"key {number % 3}")
    for number in range(7):
        with transaction.atomic(using=USING):
            send(f"first {number}")
    for number in range(7):
        with a_request(), transaction.atomic(using=USING):
            send(f"request {number}")
    with transaction.atomic(using=USING):
        publish_many(Draft(TOPIC, "", biz_id=f"{tenant}many {number}") for number in range(10))
    for _ in range(2):
        with transaction.atomic(using=USING):
            send("published twice")
    with transaction.atomic(using=USING):
        send("unique", unique=True)
        send("unique", unique=True)
        send("delayed", delay=timedelta(milliseconds=500))
        send("fails once", "fails once")
        send("dead letter", "fails")
        send("rescheduled", delay=timedelta(hours=1))
        send("restored", delay=timedelta(hours=1))
        send("cancelled")
    with prepare(TOPIC, "", biz_id=f"{tenant}prepared"):
        pass
    with contextlib.suppress(ZeroDivisionError), prepare(TOPIC, "", biz_id=f"{tenant}rolled back"):
        raise ZeroDivisionError
    for name in ("cancelled", "restored"):
        assert cancel(topic=TOPIC, biz_id=f"{tenant}{name}"), name
    assert reschedule(topic=TOPIC, biz_id=f"{tenant}rescheduled", delay=timedelta())


def expected() -> Counter[str]:
    names = [f"plain {n}" for n in range(20)] + [f"many {n}" for n in range(10)]
    names += [f"{kind} {n}" for kind in ("first", "request") for n in range(7)]
    return Counter([*names, *("published twice", "unique", "delayed", "fails once", "rescheduled", "prepared")])


def effects(tenant: str) -> Counter[str]:
    from tests.projects.shop.models import Effect

    with at_home(tenant):
        names = Effect.objects.using(USING).filter(topic=TOPIC).values_list("name", flat=True)
        return Counter(name.removeprefix(tenant) for name in names)


def receipts(tenant: str) -> dict[str, Any]:
    """The state of the message whose handler fails, and how many copies of another one have been counted."""
    from inbox.models import InboxMessage

    def value(name: str, field: str) -> Any:
        rows = InboxMessage.objects.using(USING).filter(topic=TOPIC, biz_id=f"{tenant}{name}")
        return rows.values_list(field, flat=True).first()

    return {"state": value("dead letter", "state"), "duplicates": value("published twice", "duplicates")}


def handled(wanted: Counter[str], **receipt: Any) -> None:
    """Run relays until every effect and receipt is there; more than one effect of a kind, or another one, is an error.

    Args:
        wanted: the effects of each tenant.
        **receipt: what `receipts` is to give.
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    while True:
        run("outbox_relay", "--drain")
        found = {tenant: effects(tenant) for tenant in TENANTS or ("",)}
        for tenant, names in found.items():
            assert not names - wanted, f"too much in {tenant or USING}: {names - wanted}"
        stored = {tenant: receipts(tenant) for tenant in found}
        if all(found[tenant] == wanted and stored[tenant] == receipt for tenant in found):
            return
        time.sleep(0.2)
        missing = {tenant: wanted - names for tenant, names in found.items()}
        assert time.monotonic() < deadline, f"missing: {missing}; stored: {stored}"


def operate(get: Get) -> None:
    """What an operator does: restore, retry, all commands, all pages."""
    from django.core.management import call_command

    from outbox import publish_now, restore
    from tests.projects.shop.models import Effect

    for tenant in TENANTS or ("",):
        assert restore(topic=TOPIC, biz_id=f"{tenant}restored")
        assert publish_now(topic=TOPIC, biz_id=f"{tenant}restored")
        with at_home(tenant):
            Effect.objects.using(USING).create(name="repaired", topic=TOPIC)
    call_command("inbox_retry", "--all", stdout=StringIO())
    for command in COMMANDS:
        call_command(*command, stdout=StringIO())
    pages(get)


def purge() -> None:
    """Delete everything that is settled: the messages are in history, by day."""
    from django.core.management import call_command

    from inbox.models import InboxMessage
    from outbox.models import OutboxMessage

    call_command("exactly_once_purge", "--older-than", "0d", stdout=StringIO())
    for model in (OutboxMessage, InboxMessage):
        assert not model.objects.using(USING).filter(topic=TOPIC).exclude(settled_at=None).exists(), model


def pages(get: Get) -> None:
    """Open every list, the form of one row of each, both files of the audit log, and the probes."""
    from django.contrib import admin
    from django.urls import NoReverseMatch, reverse

    paths = [reverse("admin:exactly_once_auditentry_export", args=[form]) for form in ("csv", "jsonl")]
    for model in admin.site._registry:
        if not model.__module__.startswith(("outbox", "inbox", "exactly_once")):
            continue
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}"
        paths.append(reverse(f"{name}_changelist"))
        if model._meta.managed and (row := model._default_manager.using(USING).first()):
            with contextlib.suppress(NoReverseMatch):  # a page without rows
                paths.append(reverse(f"{name}_change", args=[row.pk]))
    assert len(paths) > 23, len(paths)
    with ThreadPoolExecutor(8) as at_once:
        answers = at_once.map(get, paths) if SERVER else map(get, paths)
        for path, (status, body) in zip(paths, answers, strict=True):
            assert status == 200, f"{path}: {status}"
            assert b'name="password"' not in body, f"{path}: not logged in"
            assert not any(theirs in body for theirs in FILTERS_OF_THEMES), f"{path} has the filters of the theme, too"
            if WITH_FILTERS.search(path):
                assert body.count(b'class="message-filters"') == 1, f"{path} has no filters"
    assert get("/health/live/")[0] == 200
    # No relay is running.
    assert "database" in json.loads(get("/health/ready/outbox/")[1])["checks"]["outbox"]


def main() -> None:
    django.setup()
    commander()
    create()
    with browsing() as get:
        if SERVER:
            assert get("/write/")[0] == 200
        else:
            for tenant in TENANTS or ("",):
                with at_home(tenant):
                    write(tenant)
        getattr(PROJECT, "after", lambda: None)()
        with consuming():
            handled(expected(), state="dead", duplicates=1)
        operate(get)
    with consuming():
        # Both copies were replayed.
        handled(expected() + Counter(["repaired", "restored", "dead letter"]), state="done", duplicates=3)
    if beside := getattr(PROJECT, "beside", None):
        beside()
        with consuming():
            handled(expected() + Counter(["repaired", "restored", "dead letter"]), state="done", duplicates=5)
    purge()


if __name__ == "__main__":
    main()
