"""The inbox's tables, migrated from the first version to the newest and back, with messages in them."""

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from inbox.models import InboxMessage

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

FIRST = ("inbox", "0001_initial")
[NEWEST] = MigrationLoader(None).graph.leaf_nodes("inbox")
STATES = ["received", "retrying", "done", "dead", "skipped"]


@pytest.fixture
def migrated():
    """Migrate the tables to a version; the model as it was then: `migrated(FIRST)`."""

    def to(version):
        executor = MigrationExecutor(connection)
        executor.migrate([version])
        return MigrationExecutor(connection).loader.project_state([version]).apps.get_model("inbox", "InboxMessage")

    yield to
    to(NEWEST)
    InboxMessage.objects.all().delete()


def rows(model, *also):
    return list(model.objects.order_by("biz_id").values_list("biz_id", "state", "attempts", "duplicates", "last_error", *also))


def test_messages_survive_every_migration_forward_and_back(migrated):
    old = migrated(FIRST)
    given = [
        {"biz_id": f"o-{n}", "state": state, "attempts": n, "duplicates": n, "last_error": f"error {n}"}
        for n, state in enumerate(STATES)
    ]
    for columns in given:
        old.objects.create(
            handler="h",
            topic="t",
            message_id="m",
            content_type="",
            body=b"\x00\xff",
            digest="",
            received_at="2026-01-01T00:00Z",
            **columns,
        )
    before = rows(old)

    new = migrated(NEWEST)
    assert rows(new, "ordered", "quarantined", "redeliveries", "fence", "result", "conflicting_id") == [
        (*row, False, False, 0, 0, None, "") for row in before
    ]
    assert {bytes(body) for body in new.objects.values_list("body", flat=True)} == {b"\x00\xff"}
    new.objects.filter(biz_id="o-2").update(
        ordered=True, quarantined=True, redeliveries=1, fence=2, result={"a": 1}, conflicting_id="x", conflicting_body=b"y"
    )

    assert rows(migrated(FIRST)) == before
    assert rows(migrated(NEWEST), "ordered", "quarantined", "redeliveries", "conflicting_id") == [
        (*row, False, False, 0, "") for row in before
    ]
