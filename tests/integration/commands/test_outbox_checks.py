"""The system checks of the outbox; and each of the two apps installed without the other."""

import sys

import django
import kombu.transport
import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections

from tests.support.projects import SQLITE, run_in, settings_of


def found(prefix="outbox."):
    return {message.id: message for message in run_checks() if message.id.startswith(prefix)}


class TestOutboxSetting:
    def test_outbox_setting_of_this_project_passes(self):
        assert found() == {}

    def test_outbox_setting_with_several_mistakes_has_an_error_for_each_that_suggests_the_name(self, settings):
        settings.OUTBOX = {"BATCH_SIZ": 5, "POLL_INTERVAL": 3}

        first, _second = [message.msg for message in run_checks() if message.id == "outbox.E001"]
        assert "Did you mean 'BATCH_SIZE'?" in first

    @pytest.mark.parametrize("value", [[], "amqp://", {"BATCH_SIZE": 0}])
    def test_invalid_outbox_setting_is_an_error(self, settings, value):
        settings.OUTBOX = value

        assert "outbox.E001" in found()


HOOKS = "tests.support.hooks"


@pytest.mark.parametrize(
    ("check", "path", "reason"),
    [
        ("outbox.E004", f"{HOOKS}.tenan", f"did you mean '{HOOKS}.tenant'?"),
        ("outbox.E004", "tests.support.missing.tenant", "No module named"),
        ("outbox.E004", f"{HOOKS}.async_tenant", "it is async"),
        ("outbox.E005", f"{HOOKS}.SortedSet", f"did you mean '{HOOKS}.SortedSets'?"),
        ("outbox.E005", f"{HOOKS}.tenant", "it is not a subclass of json.JSONEncoder"),
    ],
)
def test_hook_that_cannot_be_called_and_encoder_that_cannot_be_loaded_are_errors(settings, check, path, reason):
    if check == "outbox.E004":
        settings.OUTBOX = {"PUBLISH_HOOKS": [f"{HOOKS}.tenant", path]}
    else:
        settings.OUTBOX = {"TOPICS": {"shop.*": {"ENCODER": path}, "a": {"ENCODER": f"{HOOKS}.SortedSets"}, "b": {}}}

    assert repr(path) in (problem := found()[check]).msg
    assert reason in problem.msg


@pytest.mark.parametrize("name", ["BROKER_URL", "BROKER_ULR"])
@pytest.mark.parametrize(("setting", "problem"), [("OUTBOX", "outbox.W008"), ("INBOX", "inbox.W009")])
def test_setting_beside_the_dictionary_that_is_named_like_an_option_is_reported(settings, setting, problem, name):
    setattr(settings, f"{setting}_WHATEVER_ELSE", "of another app")
    setattr(settings, f"{setting}_{name}", "amqp://shop:secret@host//")

    warning = found(setting.lower())[problem]

    assert warning.msg == f"The setting {setting}_{name} is not read."
    assert f"{setting}['BROKER_URL']" in warning.hint


class TestBrokerCheck:
    def test_broker_whose_transport_is_not_installed_is_an_error(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKER_URL": "local://"}
        monkeypatch.setitem(sys.modules, "inbox.local", None)
        error = found()["outbox.E002"]

        assert "cannot be loaded" in error.msg
        assert "needs 'inbox'" in error.hint

    def test_broker_whose_library_is_not_installed_is_an_error_that_names_the_extra(self, settings, monkeypatch):
        settings.OUTBOX = {"BROKER_URL": "redis://host/0"}
        monkeypatch.setattr(kombu.transport, "_transport_cache", {})
        monkeypatch.delitem(sys.modules, "kombu.transport.redis", raising=False)
        monkeypatch.setitem(sys.modules, "redis", None)

        assert "it is in an extra of kombu, such as kombu[redis]" in found()["outbox.E002"].msg

    @pytest.mark.parametrize("url", ["nonsense://host", "no-url-at-all", ""])
    def test_broker_unknown_to_kombu_is_an_error(self, settings, url):
        settings.OUTBOX = {"BROKER_URL": url}

        assert "outbox.E002" in found()

    @pytest.mark.parametrize("url", ["memory://", "filesystem://"])
    def test_broker_that_loses_messages_is_an_error_in_production_and_a_warning_in_debug(self, settings, url):
        settings.OUTBOX = {"BROKER_URL": url}

        settings.DEBUG = False
        assert set(found()) == {"outbox.E003"}
        settings.DEBUG = True
        assert set(found()) == {"outbox.W001"}

    def test_broker_without_confirms_is_a_warning_that_hides_the_password(self, settings):
        settings.OUTBOX = {"BROKER_URL": "redis://:secret-word@host/0"}

        [warning] = found().values()
        assert warning.id == "outbox.W001"
        assert "no publisher confirms" in warning.msg
        assert "secret-word" not in warning.msg

    @pytest.mark.parametrize("url", ["amqp://h", "amqps://h", "pyamqp://h", "local://"])
    def test_broker_with_confirms_passes(self, settings, url):
        settings.OUTBOX = {"BROKER_URL": url}

        assert found() == {}

    def test_broker_of_an_outbox_on_sqlite_is_an_error_and_its_relay_does_not_start(self, settings, monkeypatch):
        monkeypatch.setattr(connections["default"], "vendor", "sqlite")
        settings.OUTBOX = {"BROKER_URL": "local://"}
        assert found() == {}

        settings.OUTBOX = {"BROKER_URL": "amqp://shop:secret@host"}
        assert "local://" in found()["outbox.E006"].hint
        with pytest.raises(CommandError, match=r"'default' is a SQLite database.*Use local://, or PostgreSQL") as error:
            call_command("outbox_relay", "--drain", skip_checks=True)
        assert "secret" not in str(error.value)


class TestDatabaseCheck:
    def test_unsupported_database_is_an_error_when_databases_are_checked(self, project):
        project(["outbox"], ENGINE="django.db.backends.dummy", broker="amqp://h")

        status, out = project.run("check")
        assert status == 0, out
        assert "exactly_once.E001" not in out

        status, out = project.run("check", "--database", "default")
        assert status != 0
        assert "exactly_once.E001" in out
        assert "Use PostgreSQL" in out

    def test_sqlite_without_immediate_transactions_and_outbox_without_broker_and_inbox_are_warnings(self, project):
        project(["outbox"])

        status, out = project.run("check")

        assert status == 0
        for expected in ("exactly_once.W001", "'transaction_mode': 'IMMEDIATE'", "outbox.W003", "needs 'inbox'"):
            assert expected in out
        assert "Traceback" not in out


class Project:
    """A Django project of a few lines, run as a process of its own."""

    def __init__(self, directory):
        self._directory = directory

    def __call__(self, apps, *, broker=None, contents=None, **database):
        outbox = {} if broker is None else {"BROKER_URL": broker}
        settings = settings_of(*apps, database={**SQLITE, "OPTIONS": {}, **database}, OUTBOX=outbox)
        (self._directory / "scratch_settings.py").write_text(settings + (contents or ""))

    def run(self, *arguments):
        done = run_in(self._directory, "scratch_settings", "-m", "django", *arguments, PYTHONWARNINGS="error")
        return done.returncode, done.stdout


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


IMMEDIATE = {"transaction_mode": "IMMEDIATE"}


@pytest.mark.long
class TestOneAppAlone:
    @pytest.mark.parametrize(("app", "other"), [("outbox", "inbox"), ("inbox", "outbox")])
    def test_commands_for_both_apps_work_with_one_and_name_the_one_that_is_missing(self, project, app, other):
        project([app], OPTIONS=IMMEDIATE)
        project.run("migrate", "--verbosity", "0")
        for name in ("status", "purge", "export", "processes", "alerts"):
            status, out = project.run(f"exactly_once_{name}")
            assert status == 0, out
        refused = {("exactly_once_purge", "--app", other): f"--app is '{other}': INSTALLED_APPS has {app}."}
        if app == "outbox":
            of_the_inbox = "is an option of the inbox, which is not in INSTALLED_APPS."
            refused["exactly_once_status", "--conflicts"] = f"--conflicts {of_the_inbox}"
            refused["exactly_once_export", "--handler", "orders.reserve"] = f"--handler {of_the_inbox}"

        for command, said in refused.items():
            status, out = project.run(*command)
            assert (status, said in out) == (1, True), out

    def test_relay_of_an_outbox_alone_imports_no_module_of_the_inbox_and_needs_a_broker(self, project):
        project(["outbox"], OPTIONS=IMMEDIATE)
        program = "import outbox.relay.service, sys; print([name for name in sys.modules if name.startswith('inbox')])"

        status, out = project.run("shell", "--command", program)
        assert status == 0, out
        assert out.strip().endswith("[]")

        status, out = project.run("outbox_relay", "--drain")
        assert status == 1
        assert "OUTBOX['BROKER_URL'] is 'local://', which cannot be used" in out
        assert "Traceback" not in out

    def test_both_apps_together_need_no_setting(self, project):
        project(["outbox", "inbox"], OPTIONS=IMMEDIATE)

        status, out = project.run("check", "--fail-level", "WARNING")

        assert status == 0, out


class TestDatabaseSettings:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("given", "contents"),
        [({"AUTOCOMMIT": False}, ""), ({"TIME_ZONE": "America/New_York"}, ""), ({}, "USE_TZ = False\n")],
        ids=["AUTOCOMMIT", "TIME_ZONE", "USE_TZ"],
    )
    def test_database_setting_that_breaks_a_guarantee_is_an_error(self, request, project, given, contents):
        project(["outbox", "inbox"], OPTIONS=IMMEDIATE, contents=contents, **given)

        status, out = project.run("check")

        assert status != 0
        assert request.node.callspec.id in out
        assert out.count("exactly_once.E002") == 1

    @pytest.mark.parametrize(
        ("vendor", "options", "shown"),
        [
            ("postgresql", {"transaction_mode": "IMMEDIATE", "timeout": 20, "sslmode": "prefer"}, "timeout, transaction_mode"),
            ("sqlite3", {"transaction_mode": "IMMEDIATE", "pool": True}, "pool"),
        ],
    )
    def test_options_of_another_engine_are_an_error_that_names_them(self, project, vendor, options, shown):
        project(["outbox"], ENGINE=f"django.db.backends.{vendor}", OPTIONS=options)

        status, out = project.run("check")

        assert status != 0
        if vendor == "sqlite3" and django.VERSION >= (6, 1):
            # Django's own check of JSON fields connects to SQLite first.
            assert f"unexpected keyword argument '{shown}'" in out
        else:
            assert f"DATABASES['default']['OPTIONS'] has {shown}, which" in out
            assert "exactly_once.E002" in out


@pytest.mark.parametrize("label", ["eventBus", "bus_ünïcode", "b" * 34])
def test_label_from_which_postgresql_makes_other_names_of_tables_is_an_error(tmp_path, project, label):
    (tmp_path / "shop.py").write_text(
        f"from outbox.apps import OutboxConfig\n\nclass Bus(OutboxConfig):\n    label = {label!r}\n"
    )
    project(["shop.Bus"], ENGINE="django.db.backends.postgresql")

    status, out = project.run("check")

    assert status != 0
    assert "exactly_once.E004" in out
    assert repr(label) in out


def test_apps_in_the_schemas_of_tenants_are_an_error_that_names_them(settings):
    settings.TENANT_APPS = ["tests.support.apps.effects", "outbox", "inbox.apps.InboxConfig"]
    [error] = [message for message in run_checks() if message.id == "exactly_once.E005"]
    assert "The apps of the tenants contain 'outbox', 'inbox.apps.InboxConfig'." in error.msg

    settings.TENANT_APPS = ["tests.support.apps.effects"]
    settings.TENANT_TYPES = {"public": {"APPS": ["outbox"]}, "shop": {"APPS": ["outbox"]}}
    assert "exactly_once.E005" in {message.id for message in run_checks()}

    settings.TENANT_TYPES = {"public": {"APPS": ["outbox"]}}
    assert "exactly_once.E005" not in {message.id for message in run_checks()}
