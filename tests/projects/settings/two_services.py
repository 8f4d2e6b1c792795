"""Two services with one database: one keeps receipts and history for a year, the other for a day"""

import os
import subprocess
import sys
from datetime import timedelta

from tests.projects.settings.plain import *

service = os.environ.get("SERVICE", "orders")
superuser = {"username": service}
broker = True

if service == "billing":
    INBOX = {**INBOX, "RETENTION": timedelta(days=1), "KEEP_HISTORY": timedelta(hours=1)}


def _beside():
    """Two days later the other service runs the whole cycle, while this one is stopped. It replays and purges everything."""
    from django.db.models import F
    from django.test.utils import setup_test_environment

    from exactly_once.testing.database import travel
    from inbox.models import InboxMessage, Receipt

    setup_test_environment()
    travel(timedelta(days=2))
    InboxMessage.objects.exclude(day=0).update(day=F("day") - 2)
    receipts = Receipt.objects.filter(handler__startswith="orders")
    before = receipts.count()
    subprocess.run([sys.executable, "-m", "tests.projects.cycle"], env={**os.environ, "SERVICE": "billing"}, check=True)
    assert receipts.count() == before > 40


beside = _beside if service == "orders" else None
