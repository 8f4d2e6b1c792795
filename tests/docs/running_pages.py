"""Runs the Python blocks of the pages: `python -m tests.docs.running_pages` prints a dot for each, or a line if it fails.

The reader's own modules and names are replaced by stand-ins that accept every use, so a block runs without the project that it
is a part of. What runs for real is ours: decorators and their options, `publish()` and others in real transactions, values of
OUTBOX and INBOX. Bodies of functions do not run.

Each page runs in a fork of this process, so that its handlers, callbacks and checkers are registered there only.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.util
import logging
import operator
import os
import re
import sys
import traceback
import types
from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby, product

import django
from django.conf import settings
from django.core.management import call_command
from django.db import transaction
from django.db.models import F

from inbox.handlers.registry import registry
from tests.support.pages import Block, blocks

ALIASES = ("default", "billing", "savings", "direct")
WITH_OUTBOX = ("default", "billing")
NOT_RUN = (
    "kombu.Connection(",  # connects to a broker
    "from inbox import pause,",  # names a handler of another page
    "run_handler(build_report",  # calls the handler of an earlier block in a test of its own
    "run_handler(settle",  # likewise
)
MEMORY = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


class Anything(str):  # noqa: SLOT000 - pages set attributes of the reader's objects
    """Stands for an object of the reader's project: a text in a payload; and what one gets from it is such an object, too."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *args, **kwargs):
        return self

    def __getitem__(self, key):
        return self

    def __setitem__(self, key, value):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __iter__(self):
        return iter(())

    def __format__(self, specification):
        return str(self)


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Anything, f"__{_name}__", lambda self, other: self)
    setattr(Anything, f"__r{_name}__", lambda self, other: self)


def a_module(name):
    module = types.ModuleType(name)
    module.__getattr__ = Anything
    return module


class ReadersModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that pages import and that are not installed; each name in them is `Anything`."""

    def __init__(self):
        imports = [re.findall(r"^(?:from|import) (\w+)", block.code, re.MULTILINE) for block in blocks("python")]
        self._packages = {name for names in imports for name in names}

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        return a_module(spec.name)

    def exec_module(self, module):
        pass


def main() -> int:
    settings.configure(
        SECRET_KEY="x",
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DATABASES={alias: dict(MEMORY) for alias in ALIASES},
        INSTALLED_APPS=[
            *(f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes", "messages", "sessions")),
            *("exactly_once", "exactly_once.contrib.views", "outbox", "outbox.contrib.recurring"),
            *("inbox", "inbox.contrib.joins", "inbox.contrib.outgoing_webhooks", "inbox.contrib.tasks"),
        ],
        OUTBOX={"BROKER_URL": "amqp://broker//"},
        STRIPE_WEBHOOK_SECRET="whsec_eA==",
        SHOP_WEBHOOK_SECRET="whsec_eA==",
        BANK_SECRET="x",
    )
    django.setup()
    logging.disable(logging.CRITICAL)
    for alias, app in product(WITH_OUTBOX, ("outbox", "inbox")):
        call_command("migrate", app, verbosity=0, database=alias)
    well_known()  # imported once, and not in every fork
    sys.meta_path.append(ReadersModules())
    failed = [_run_apart(list(of_page)) for _, of_page in groupby(blocks("python"), key=operator.attrgetter("page"))]
    return int(any(failed))


def _run_apart(of_page: list[Block]) -> bool:
    """Did one of the blocks fail? The databases are in memory, so a fork has its own copies."""
    sys.stdout.flush()
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    failed = True
    try:
        names: dict = {}
        failed = sum(_has_failed(block, names) for block in of_page) > 0
    except Exception:  # noqa: BLE001 - a fork must not go on with its parent's work
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(failed)


def _has_failed(block: Block, names: dict) -> bool:
    """Run it with the names of the earlier blocks of its page."""
    if block.is_fragment or any(text in block.code for text in NOT_RUN):
        return False
    for handler in registry.all():
        registry.remove(handler.name)  # blocks of one page may be alternatives
    tree = ast.parse(block.source)
    tree.body = [statement for statement in tree.body if not _is_model(statement)]
    names |= _defaults(block, tree, names)
    try:
        module = a_module(names["__name__"])
        if block.title.endswith(".py"):  # dataclasses look their module up, and later blocks of the page may import it
            sys.modules[module.__name__] = module
        exec(compile(tree, block.place, "exec"), names)
        vars(module).update(names)
        _check_options(names)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is printed
        sys.stdout.write(f"{block.place}: {type(error).__name__}: {error}\n")
        return True
    sys.stdout.write(".")
    return False


def _is_model(statement: ast.stmt) -> bool:
    """A model needs an installed app."""
    return isinstance(statement, ast.ClassDef) and "models.Model" in map(ast.unparse, statement.bases)


def _defaults(block: Block, tree: ast.Module, names: dict) -> dict:
    """What the block uses and does not define: ours and Django's by their names, everything else is the reader's."""
    for variable in re.findall(r'os\.environ\["(\w+)"\]', block.code):
        os.environ.setdefault(variable, "amqp://broker//" if variable == "BROKER_URL" else "x")
    module = block.title.removesuffix(".py").replace("/", ".") if block.title.endswith(".py") else "shop.code"
    known = {**vars(builtins), **well_known(), **names}
    given = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {"__name__": module, **{name: known.get(name, Anything(name)) for name in given - {*vars(builtins)}}}


def well_known() -> dict:
    """What pages use without importing it."""
    import exactly_once.contrib.views  # noqa: PLC0415 - needs configured settings, as do the others
    import inbox.celery  # noqa: PLC0415
    import inbox.contrib.http  # noqa: PLC0415
    import inbox.contrib.joins  # noqa: PLC0415
    import inbox.contrib.outgoing_webhooks  # noqa: PLC0415
    import inbox.testing  # noqa: PLC0415
    import outbox.celery  # noqa: PLC0415
    import outbox.contrib.incoming_webhooks  # noqa: PLC0415
    import outbox.contrib.recurring  # noqa: PLC0415
    import outbox.testing  # noqa: PLC0415

    modules: Iterable = (
        *(outbox.testing, inbox.testing, outbox.contrib.incoming_webhooks, inbox.contrib.http, inbox.contrib.joins),
        *(exactly_once.contrib.views, outbox.contrib.recurring, inbox.contrib.outgoing_webhooks, outbox, inbox),
    )
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    celery = {"OutboxTask": outbox.celery.OutboxTask, "idempotent_task": inbox.celery.idempotent_task}
    django_names = {"transaction": transaction, "timedelta": timedelta, "F": F, "settings": settings}
    lists: dict = {"DATABASES": {"default": {}}, "INSTALLED_APPS": []}
    return {**public, **celery, **django_names, **lists}


def _check_options(names: dict) -> None:
    from exactly_once.conf.settings import parse  # noqa: PLC0415
    from inbox.conf import InboxOptions  # noqa: PLC0415 - as above
    from outbox.conf import OutboxOptions  # noqa: PLC0415

    for setting, options in (("OUTBOX", OutboxOptions), ("INBOX", InboxOptions)):
        if isinstance(given := names.pop(setting, None), dict):
            parse(options, setting, given)


if __name__ == "__main__":
    sys.exit(main())
