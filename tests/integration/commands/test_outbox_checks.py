"""The system checks of the outbox; and each of the two apps installed without the other."""

import sys

import django
import kombu.transport
import pytest
from django.core.checks import run_checks

from exactly_once import checks
from tests.support.projects import run_in


def found(prefix="outbox."):
    return {message.id: message for message in run_checks() if message.id.startswith(prefix)}


class TestOutboxSetting:
    def test_outbox_setting_of_this_project_passes(self):
        assert found() == {}

    def test_outbox_setting_with_a_typo_is_an_error_that_suggests_the_name(self, settings):
        settings.OUTBOX = {"BATCH_SIZ": 5}

        assert "Did you mean 'BATCH_SIZE'?" in found()["outbox.E001"].msg

    def test_outbox_setting_with_several_mistakes_has_an_error_for_each(self, settings):
        settings.OUTBOX = {"BATCH_SIZ": 5, "POLL_INTERVAL": 3}

        assert len([m for m in run_checks() if m.id == "outbox.E001"]) == 2

    @pytest.mark.parametrize("value", [[], "amqp://", {"BATCH_SIZE": 0}])
    def test_invalid_outbox_setting_is_an_error(self, settings, value):
        settings.OUTBOX = value

        assert "outbox.E001" in found()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests.support.hooks.tenan", "did you mean 'tests.support.hooks.tenant'?"),
        ("tests.support.missing.tenant", "No module named"),
        ("tests.support.hooks.async_tenant", "it is async"),
    ],
)
def test_publish_hook_that_cannot_be_called_is_an_error(settings, path, reason):
    settings.OUTBOX = {"PUBLISH_HOOKS": ["tests.support.hooks.tenant", path]}

    assert repr(path) in (problem := found()["outbox.E004"]).msg
    assert reason in problem.msg


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests.support.hooks.SortedSet", "did you mean 'tests.support.hooks.SortedSets'?"),
        ("tests.support.hooks.tenant", "it is not a subclass of json.JSONEncoder"),
    ],
)
def test_encoder_that_cannot_be_loaded_is_an_error(settings, path, reason):
    settings.OUTBOX = {"TOPICS": {"shop.*": {"encoder": path}, "a": {"encoder": "tests.support.hooks.SortedSets"}, "b": {}}}

    assert repr(path) in (problem := found()["outbox.E005"]).msg
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


class TestDatabaseCheck:
    @pytest.mark.every_database
    @pytest.mark.django_db
    def test_supported_database_passes(self):
        assert checks.check_databases(None, databases=["default"]) == []

    def test_database_is_checked_only_when_asked_for(self, project):
        project(["outbox"], engine="django.db.backends.dummy", broker="amqp://h")

        status, out = project.run("check")

        assert status == 0, out
        assert "exactly_once.E001" not in out

    def test_unsupported_database_is_an_error(self, project):
        project(["outbox"], engine="django.db.backends.dummy", broker="amqp://h")

        status, out = project.run("check", "--database", "default")

        assert status != 0
        assert "exactly_once.E001" in out
        assert "Use PostgreSQL" in out

    def test_sqlite_without_immediate_transactions_is_a_warning(self, project):
        project(["outbox"], broker="amqp://h")

        status, out = project.run("check")

        assert status == 0
        assert "exactly_once.W001" in out
        assert "'transaction_mode': 'IMMEDIATE'" in out


class Project:
    """A Django project of a few lines, run as a process of its own."""

    def __init__(self, directory):
        self._directory = directory

    def __call__(self, apps, *, engine="django.db.backends.sqlite3", options=None, broker=None):
        outbox = {} if broker is None else {"BROKER_URL": broker}
        database = {"ENGINE": engine, "NAME": str(self._directory / "db.sqlite3"), "OPTIONS": options or {}}
        (self._directory / "scratch_settings.py").write_text(
            f"INSTALLED_APPS = {['exactly_once', *apps]!r}\nDATABASES = {{'default': {database!r}}}\n"
            f"OUTBOX = {outbox!r}\nSECRET_KEY = 'x'\nUSE_TZ = True\n"
            "DEFAULT_AUTO_FIELD = 'django.db.models.BigAutoField'\n"
        )

    def run(self, *arguments):
        done = run_in(self._directory, "scratch_settings", "-m", "django", *arguments, PYTHONWARNINGS="error")
        return done.returncode, done.stdout


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


IMMEDIATE = {"transaction_mode": "IMMEDIATE"}


@pytest.mark.long
class TestOneAppAlone:
    @pytest.mark.parametrize("apps", [["outbox"], ["inbox"], ["outbox", "inbox"]], ids="+".join)
    def test_each_app_migrates_and_passes_every_check_alone(self, project, apps):
        project(apps, options=IMMEDIATE, broker="amqp://guest:guest@localhost//")

        for command in (
            ["migrate", "--verbosity", "0"],
            ["check", "--fail-level", "WARNING", "--database", "default"],
            ["makemigrations", "--check", "--dry-run"],
        ):
            status, out = project.run(*command)
            assert status == 0, out

    @pytest.mark.parametrize(("app", "other"), [("outbox", "inbox"), ("inbox", "outbox")])
    def test_commands_for_both_apps_work_with_one_and_name_the_one_that_is_missing(self, project, app, other):
        project([app], options=IMMEDIATE, broker="amqp://guest:guest@localhost//")
        project.run("migrate", "--verbosity", "0")
        for name in ("status", "purge", "export", "processes", "alerts"):
            status, out = project.run(f"exactly_once_{name}")
            assert status == 0, out

        status, out = project.run("exactly_once_purge", "--app", other)

        assert status == 1
        assert f"--app is '{other}': INSTALLED_APPS has {app}." in out

    def test_option_of_the_inbox_is_refused_without_it(self, project):
        project(["outbox"], options=IMMEDIATE, broker="amqp://guest:guest@localhost//")

        for command in (["exactly_once_status", "--conflicts"], ["exactly_once_export", "--handler", "orders.reserve"]):
            status, out = project.run(*command)
            assert status == 1
            assert f"{command[1]} is an option of the inbox, which is not in INSTALLED_APPS." in out

    def test_relay_imports_no_module_of_the_inbox(self, project):
        project(["outbox"], options=IMMEDIATE, broker="amqp://h")

        program = "import outbox.relay.service, sys; print([name for name in sys.modules if name.startswith('inbox')])"

        status, out = project.run("shell", "--command", program)

        assert status == 0, out
        assert out.strip().endswith("[]")

    def test_outbox_without_a_broker_and_without_the_inbox_is_a_warning(self, project):
        project(["outbox"], options=IMMEDIATE)

        status, out = project.run("check")

        assert status == 0
        assert "outbox.W003" in out
        assert "needs 'inbox'" in out
        assert "Traceback" not in out

    def test_outbox_relay_without_a_broker_and_without_the_inbox_ends_with_one_sentence(self, project):
        project(["outbox"], options=IMMEDIATE)

        status, out = project.run("outbox_relay", "--drain")

        assert status == 1
        assert "OUTBOX['BROKER_URL'] is 'local://', which cannot be used" in out
        assert "Traceback" not in out

    def test_both_apps_together_need_no_setting(self, project):
        project(["outbox", "inbox"], options=IMMEDIATE)

        status, out = project.run("check", "--fail-level", "WARNING")

        assert status == 0, out


class TestDatabaseSettings:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"autocommit": "False"}, "AUTOCOMMIT"),
            ({"zone": "'America/New_York'"}, "TIME_ZONE"),
            ({"use_tz": "False"}, "USE_TZ"),
        ],
    )
    def test_database_setting_that_breaks_a_guarantee_is_an_error(self, tmp_path, settings, named):
        (tmp_path / "odd_settings.py").write_text(
            f"USE_TZ = {settings.get('use_tz', 'True')}\n"
            "INSTALLED_APPS = ['django.contrib.contenttypes', 'exactly_once', 'outbox', 'inbox']\n"
            "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': 'x.sqlite3', "
            f"'AUTOCOMMIT': {settings.get('autocommit', 'True')}, 'TIME_ZONE': {settings.get('zone', 'None')}, "
            "'OPTIONS': {'transaction_mode': 'IMMEDIATE'}}}\n"
        )

        done = run_in(tmp_path, "odd_settings", "-m", "django", "check")

        assert done.returncode != 0
        assert named in done.stdout
        assert done.stdout.count("exactly_once.E002") == 1

    @pytest.mark.parametrize(
        ("vendor", "options", "shown"),
        [
            ("postgresql", {"transaction_mode": "IMMEDIATE", "timeout": 20, "sslmode": "prefer"}, "timeout, transaction_mode"),
            ("sqlite3", {"transaction_mode": "IMMEDIATE", "pool": True}, "pool"),
        ],
    )
    def test_options_of_another_engine_are_an_error_that_names_them(self, tmp_path, vendor, options, shown):
        (tmp_path / "left_settings.py").write_text(
            "INSTALLED_APPS = ['django.contrib.contenttypes', 'exactly_once', 'outbox']\n"
            f"DATABASES = {{'default': {{'ENGINE': 'django.db.backends.{vendor}', 'NAME': 'x', 'OPTIONS': {options!r}}}}}\n"
        )

        done = run_in(tmp_path, "left_settings", "-m", "django", "check")

        assert done.returncode != 0
        if vendor == "sqlite3" and django.VERSION >= (6, 1):
            # Django's own check of JSON fields connects to SQLite first.
            assert f"unexpected keyword argument '{shown}'" in done.stdout
        else:
            assert f"DATABASES['default']['OPTIONS'] has {shown}, which" in done.stdout
            assert "exactly_once.E002" in done.stdout


@pytest.mark.parametrize("label", ["eventBus", "bus_ünïcode", "b" * 34])
def test_label_from_which_postgresql_makes_other_names_of_tables_is_an_error(tmp_path, label):
    (tmp_path / "shop.py").write_text(
        f"from outbox.apps import OutboxConfig\n\nclass Bus(OutboxConfig):\n    label = {label!r}\n"
    )
    (tmp_path / "labelled_settings.py").write_text(
        "INSTALLED_APPS = ['django.contrib.contenttypes', 'exactly_once', 'shop.Bus']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.postgresql', 'NAME': 'x'}}\n"
    )

    done = run_in(tmp_path, "labelled_settings", "-m", "django", "check")

    assert done.returncode != 0
    assert "exactly_once.E004" in done.stdout
    assert repr(label) in done.stdout


def test_apps_in_the_schemas_of_tenants_are_an_error_that_names_them(settings):
    settings.TENANT_APPS = ["tests.support.apps.effects", "outbox", "inbox.apps.InboxConfig"]
    [error] = [message for message in run_checks() if message.id == "exactly_once.E005"]
    assert "The apps of the tenants contain 'outbox', 'inbox.apps.InboxConfig'." in error.msg

    settings.TENANT_APPS = ["tests.support.apps.effects"]
    settings.TENANT_TYPES = {"public": {"APPS": ["outbox"]}, "shop": {"APPS": ["outbox"]}}
    assert "exactly_once.E005" in {message.id for message in run_checks()}

    settings.TENANT_TYPES = {"public": {"APPS": ["outbox"]}}
    assert "exactly_once.E005" not in {message.id for message in run_checks()}


@pytest.mark.parametrize(
    "command",
    [
        ["outbox_relay", "--drain"],
        ["outbox_restore", "--all"],
        ["inbox_retry", "--all"],
        *([name, "--app", app] for name in ("exactly_once_status", "exactly_once_purge") for app in ("outbox", "inbox")),
    ],
    ids=" ".join,
)
def test_command_without_its_tables_says_to_run_migrate(project, command):
    project(["outbox", "inbox"], options=IMMEDIATE)

    status, out = project.run(*command)

    assert status != 0
    assert "The database 'default' is not migrated for this version" in out
    assert "Run `python manage.py migrate " in out
    assert "Traceback" not in out
