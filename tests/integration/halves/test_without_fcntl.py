"""Windows has neither fcntl nor resource, termios and others: there the web side works, and a process refuses in one line."""

from tests.support.projects import run_in

MISSING = "import sys\nsys.modules.update(dict.fromkeys(['fcntl', 'grp', 'pwd', 'resource', 'termios', 'tty']))\n"
SETTINGS = """\
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "exactly_once", "outbox", "inbox"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "shop.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
"""
USE = """
import django
django.setup()
from django.core.management import call_command
from django.db import transaction
from inbox import idempotent_handler
from outbox import publish
from outbox.models import OutboxMessage

call_command("migrate", verbosity=0)
with transaction.atomic():
    publish("shop.order.placed", {})
assert OutboxMessage.objects.get().state == "ready"
call_command("exactly_once_status")
"""
COMMAND = "from django.core.management import execute_from_command_line\nexecute_from_command_line(['manage.py', {!r}])\n"


def test_web_side_works_and_a_process_refuses_in_one_line(tmp_path):
    (tmp_path / "settings_of_shop.py").write_text(SETTINGS)

    used = run_in(tmp_path, "settings_of_shop", "-c", MISSING + USE)
    relayed, consumed = (
        run_in(tmp_path, "settings_of_shop", "-c", MISSING + COMMAND.format(name)) for name in ("outbox_relay", "inbox_consume")
    )

    assert used.returncode == 0, used.stdout
    for refused in (relayed, consumed):
        assert refused.returncode == 1
        assert len(refused.stdout.splitlines()) == 1, refused.stdout
        assert "needs fcntl" in refused.stdout
