"""The code on the pages and in docs/examples: it compiles, what it names exists, and it runs.

Pages that are run word for word have tests of their own: `integration/testing/test_documented_examples.py` and the tests of the
tutorial.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml
from django.core.management import BaseCommand, CommandError, get_commands, load_command_class
from prometheus_client import REGISTRY

from exactly_once import metrics
from inbox.conf import InboxOptions
from inbox.contrib.tasks.compat import PACKAGE
from inbox.signals import message_dead, message_handled
from outbox.conf import OutboxOptions
from tests.docs.running_pages import well_known
from tests.support import ROOT
from tests.support.commands import ran
from tests.support.lower_bounds import at_least
from tests.support.pages import EXAMPLES, blocks, commands, pages

OURS = ("exactly_once", "outbox", "inbox")


@pytest.fixture(scope="module")
def known():
    return well_known()


def trees():
    """The Python blocks of the pages, each with its place."""
    return [(block.place, ast.parse(block.source)) for block in at_least(150, blocks("python"))]


def test_every_import_of_a_python_block_resolves():
    imports = at_least(150, [(place, *each) for place, tree in trees() for each in imported_by(tree)])
    # Before Django 6.0 it is that package.
    found = [(place, module.replace("django.tasks", PACKAGE), name) for place, module, name in imports]

    assert [(place, module, name) for place, module, name in found if not exists(module, name)] == []


def imported_by(tree):
    """What a block imports from packages that are installed here. Others are the reader's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [(name.name, None) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [(node.module, name.name) for name in node.names]
        else:
            continue
        yield from (each for each in imported if is_installed(each[0].partition(".")[0]))


def is_installed(package):
    return package in sys.modules or importlib.util.find_spec(package) is not None


def exists(module, name):
    try:
        found = importlib.import_module(module)
        return name is None or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ImportError:
        return False


def test_every_block_that_is_a_whole_file_imports_or_defines_what_it_uses():
    files = at_least(40, [block for block in blocks("python") if block.is_a_whole_file])

    missing = [(block.place, undefined_in(ast.parse(block.source))) for block in files]
    assert [each for each in missing if each[1]] == []


def undefined_in(tree):
    """The names that are used and bound nowhere."""
    used, bound = set(), {*vars(builtins), "__name__"}
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign():
                node.target.ctx = ast.Load()  # `+=` uses the name, which the walk comes to later
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
                bound.add(name)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
    return sorted(used - bound)


def test_every_call_of_a_public_function_on_a_page_fits_its_signature(known):
    calls = [
        (place, function, call)
        for place, tree in trees()
        for names in [names_in(tree, known)]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and is_ours(function := value_of(call.func, names))
    ]

    wrong = [(place, ast.unparse(call), misfit(function, call)) for place, function, call in at_least(100, calls)]
    assert [each for each in wrong if each[2]] == []


def names_in(tree, known):
    """What the names of a block mean, without those that it defines itself."""
    names = dict(known)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.pop(node.name, None)
        elif isinstance(node, ast.arg):
            names.pop(node.arg, None)
        elif isinstance(node, ast.ImportFrom) and exists(node.module, None):
            module = importlib.import_module(node.module)
            names |= {name.asname or name.name: getattr(module, name.name, None) for name in node.names}
    return names


def value_of(node, names):
    if isinstance(node, ast.Attribute):
        return getattr(value_of(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def is_ours(function):
    return callable(function) and (getattr(function, "__module__", "") or "").startswith(OURS)


def misfit(function, call):
    """Why the function does not take the call's arguments, or "". With `*` or `**` only what is named is compared."""
    starred = any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords)
    given = [None for each in call.args if not isinstance(each, ast.Starred)]
    named = {each.arg: None for each in call.keywords if each.arg is not None}
    signature = inspect.signature(function)
    try:
        (signature.bind_partial if starred else signature.bind)(*given, **named)
    except TypeError as error:
        return str(error)
    return ""


def test_every_attribute_of_our_objects_in_a_function_on_a_page_exists(known):
    read = [
        (place, kind, attribute)
        for place, tree in trees()
        for names in [names_in(tree, known)]
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in function.args.args
        if is_ours(kind := value_of(argument.annotation, names))
        for attribute in attributes_of(argument.arg, function)
    ]

    assert [(place, attribute) for place, kind, attribute in at_least(30, read) if not has(kind, attribute)] == []


def attributes_of(name, function):
    """What the function reads from its argument `name`."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return [node.attr for node in found if node.value.id == name]


def has(kind, attribute):
    return hasattr(kind, attribute) or (is_dataclass(kind) and attribute in {field.name for field in fields(kind)})


def test_python_blocks_run():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DJANGO_"))}
    done = ran(sys.executable, "-m", "tests.docs.running_pages", environment=environment)

    assert (done.returncode, done.stdout.strip(".")) == (0, "")
    at_least(120, done.stdout)


def test_every_json_and_yaml_block_can_be_read():
    """What is included from a file (`--8<--`) is tested with that file."""
    readers = {"json": json.loads, "yaml": yaml.safe_load}
    wrong = []
    for block in at_least(5, [block for block in blocks(*readers) if "--8<--" not in block.code]):
        try:
            readers[block.language](block.source)
        except (ValueError, yaml.YAMLError) as error:
            wrong.append(f"{block.place}: {error}")

    assert wrong == []


def test_every_option_that_a_page_names_exists():
    options = {"OUTBOX": OutboxOptions, "INBOX": InboxOptions}
    named = [
        (setting, name, page.relative_to(ROOT).as_posix())
        for page in pages()
        for setting, name in re.findall(r'\b(OUTBOX|INBOX)\[["\'](\w+)["\']\]', page.read_text())
    ]

    assert [each for each in at_least(50, named) if not hasattr(options[each[0]](), each[1])] == []


def problem_with(command, *arguments):
    """Why `manage.py` does not take this command line, or ""."""
    if command not in get_commands():
        return f"there is no command {command}"
    app = get_commands()[command]
    loaded = app if isinstance(app, BaseCommand) else load_command_class(app, command)
    parser = loaded.create_parser("manage.py", command)
    for action in parser._actions:
        if action.dest == "database":
            action.choices = None  # the aliases of the tests
    try:
        parser.parse_args(list(arguments))
    except CommandError as error:
        return f"{command}: {error}"
    return ""


def test_every_command_line_of_a_shell_block_is_accepted():
    lines = [(block.place, line) for block in blocks("bash", "yaml", "dockerfile") for line in commands(block.source)]

    assert [f"{place}: {problem}" for place, line in at_least(50, lines) if (problem := problem_with(*line))] == []


def test_every_option_of_our_commands_in_the_text_exists():
    written = re.compile(rf"`(?:python manage\.py )?((?:{'|'.join(OURS)})_\w+)( [^`\n]*--[^`\n]*)`")
    options = [
        (str(page.relative_to(ROOT)), command, option)
        for page in pages()
        for command, arguments in written.findall(page.read_text())
        for option in re.findall(r"--[\w-]+", arguments)
    ]

    assert {command.rpartition("_")[0] for _, command, _ in at_least(20, options)} == {*OURS}
    assert [each for each in options if each[2] not in options_of(each[1])] == []


def options_of(command):
    return load_command_class(get_commands()[command], command).create_parser("manage.py", command)._option_string_actions


def example_files():
    return sorted(path for path in EXAMPLES.rglob("*") if path.is_file())


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def test_every_command_line_of_an_example_file_is_accepted():
    lines = [(path.name, line) for path in example_files() for line in commands(path.read_text())]

    assert {"compose.yaml", "consumer.yaml", "migrate.yaml", "relay.yaml"} <= {name for name, _ in lines}
    assert {"shop-consumer.service", "shop-relay.service"} <= {name for name, _ in lines}
    assert [f"{name}: {problem}" for name, line in lines if (problem := problem_with(*line))] == []


def test_every_kubernetes_example_names_what_it_is_and_selects_its_own_pods():
    found = [each for path in sorted((EXAMPLES / "kubernetes").glob("*.yaml")) for each in documents(path)]
    deployments = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "Deployment"}

    assert all({"apiVersion", "kind", "metadata", "spec"} == {*each} for each in found)
    assert {*deployments} == {"shop-relay", "shop-consumer"}
    for spec in deployments.values():
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    for each in found:
        if each["kind"] == "ScaledObject":
            assert each["spec"]["scaleTargetRef"]["name"] in deployments


def how_to(name):
    return (ROOT / "docs" / "how-to" / f"{name}.md").read_text()


def test_example_files_set_the_variables_that_the_settings_read():
    read = {*re.findall(r'os\.environ\["(\w+)"\]', how_to("production"))}
    [compose] = documents(EXAMPLES / "compose.yaml")
    [unit] = re.findall(r'title="/etc/shop/environment"\n(.*?)^```', how_to("deploy-systemd"), re.MULTILINE | re.DOTALL)
    scaled = {*re.findall(r"FromEnv: (\w+)", (EXAMPLES / "kubernetes" / "scale.yaml").read_text())}

    assert {*compose["x-shop"]["environment"]} - {"DJANGO_SETTINGS_MODULE"} == read
    assert {*re.findall(r"^(\w+)=", unit, re.MULTILINE)} - {"DJANGO_SETTINGS_MODULE"} == read
    assert scaled <= read


def test_example_files_stop_processes_after_the_longest_shutdown():
    grace = max(options().SHUTDOWN_GRACE.total_seconds() for options in (OutboxOptions, InboxOptions))
    text = "\n".join(path.read_text() for path in example_files())
    limits = re.findall(r"(?:TimeoutStopSec=|stop_grace_period: |terminationGracePeriodSeconds: )(\d+)", text)

    assert len(limits) == 5
    assert {*map(int, limits)} == {grace + 10}


def test_example_files_and_their_pages_query_metrics_that_exist():
    texts = [path.read_text() for path in [*example_files(), *pages()]]
    queried = {name for text in texts for name in re.findall(r"\b((?:outbox|inbox|exactly_once)_\w+)\{", text)}

    assert {*at_least(4, queried)} <= {*metrics.instruments}


def test_log_lines_and_errors_on_the_page_of_symptoms_are_those_of_the_code():
    """A line on the page has … where the code has a value."""
    page = how_to("troubleshoot")
    tables = re.findall(r"^## Lines in the log.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = [line for table in tables for line in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)]
    lines += [error for symptom in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for error in re.findall(r'"(.+?)"', symptom)]
    texts = "\n".join(
        node.value
        for side in OURS
        for path in sorted(Path(ROOT, side).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

    assert [line for line in at_least(20, lines) if not all(part.strip() in texts for part in line.split("…"))] == []


@pytest.fixture
def documented():
    """The names of the documented receivers and counters, connected for this test."""
    page = (ROOT / "docs" / "reference" / "signals.md").read_text()
    [code] = re.findall(r'^```python title="orders/metrics.py.*?\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "orders/metrics.py", "exec"), names)
    yield names
    message_handled.disconnect(names["count_handled"])
    message_dead.disconnect(names["count_dead"])
    for name in ("HANDLED", "DEAD"):
        REGISTRY.unregister(names[name])


@pytest.mark.usefixtures("documented")
def test_documented_receivers_count_handled_and_dead_messages_by_handler():
    for handler in ("a", "a", "b"):
        message_handled.send_robust(None, handler=handler, message_id="m-1")
    message_dead.send_robust(None, handler="b", message_id="m-1", error="no stock")

    for name, counts in {"handled": {"a": 2, "b": 1}, "dead": {"a": None, "b": 1}}.items():
        for handler, count in counts.items():
            assert REGISTRY.get_sample_value(f"orders_messages_{name}_total", {"handler": handler}) == count
