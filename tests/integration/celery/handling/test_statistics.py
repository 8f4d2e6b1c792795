"""The statistics of Celery's workers, which send no heartbeats."""

import pytest

from exactly_once.models import Minute

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(180)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_worker_writes_what_its_tasks_have_done(tasks, worker, pool):
    def written():
        return list(Minute.objects.filter(subject="celery.shop.charge", counts__handled__gt=0))

    with worker(pool=pool) as running:
        tasks["shop.charge"].delay({"id": "o-1"}).get(timeout=60, interval=0.05)
        [row] = running.until(written)

    assert (row.counts, sum(row.times["to_effect"].values())) == ({"handled": 1}, 1)
