"""The example of "Effects outside the database", as it is on the page, in a process that is killed at each of its steps."""

import pytest

from tests.support.apps.effects.models import Payment
from tests.support.deliveries import make_due
from tests.support.relaying import published

SETTINGS = "tests.support.apps.payments.settings"
_COMPANIES = "tests.support.apps.payments.companies"
POINTS = {
    "reserved, the step not stored": f"after {_COMPANIES}.StockService.reserve",
    "charged, the step not stored": f"after {_COMPANIES}.Bank.charge",
    "both steps stored, nothing recorded": "before django.db.models.query.QuerySet.update_or_create",
    "the payment committed": "after django.db.models.query.QuerySet.update_or_create",
}


@pytest.mark.every_database
@pytest.mark.parametrize("name", POINTS)
def test_process_killed_at_any_step_of_the_example_has_charged_once_and_recorded_one_payment(local_world, name):
    published("shop.order.placed", {"order_id": "17", "sku": "mug", "total": "9.50"})
    local_world.dies_at(POINTS[name], local_world.relay)
    payments = Payment.objects.count()
    make_due()  # as if its lease had ended
    local_world.relay()
    local_world.wait_until(lambda: local_world.inbox() == {"done": 1}, "the message is done")

    assert payments == (name == "the payment committed")
    assert local_world.runs() == {"reserved": 1, "charged": 1}
    assert Payment.objects.get().order == "17"
