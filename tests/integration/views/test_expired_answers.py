"""Expired answers are deleted by the command where no relay or consumer does it."""

import pytest

from tests.support.projects import SQLITE, run_in, settings_of

EXPIRED = """
import django; django.setup()
from datetime import timedelta
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.process.clock import utcnow
rows, now = IdempotentRequest.objects.using({alias!r}), utcnow()
for key, hours in ("old", -1), ("new", 1):
    rows.create(scope="s", key=key, at=now, expires_at=now + timedelta(hours=hours), status=201)
"""
LEFT = """
import django; django.setup()
from exactly_once.contrib.views.models import IdempotentRequest
print(*IdempotentRequest.objects.using({alias!r}).values_list("key", flat=True))
"""


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("apps", "alias"),
    [(["exactly_once.contrib.views"], "default"), (["outbox", "inbox", "exactly_once.contrib.views"], "payments")],
    ids=["without outbox and inbox", "in a database without them"],
)
def test_command_deletes_expired_answers(tmp_path, apps, alias):
    settings = settings_of(*apps, database={**SQLITE, "NAME": str(tmp_path / "default.sqlite3")})
    payments = {**SQLITE, "NAME": str(tmp_path / "payments.sqlite3")}
    (tmp_path / "project_settings.py").write_text(f"{settings}\nDATABASES['payments'] = {payments!r}\n")

    def run(*arguments):
        done = run_in(tmp_path, "project_settings", *arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout

    run("-m", "django", "migrate", "--verbosity", "0", "exactly_once_views", "--database", alias)
    run("-c", EXPIRED.format(alias=alias))
    purge = ("-m", "django", "exactly_once_purge", "--database", alias)

    for found in (run(*purge, "--dry-run"), run(*purge)):
        assert found.split() == ["exactly_once", *found.split()[1:-3], "idempotent", "requests", "1"]
    assert run("-c", LEFT.format(alias=alias)).split() == ["new"]
