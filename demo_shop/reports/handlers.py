"""An order is reported when two exports have arrived: that of its payment and that of its shipment."""

from __future__ import annotations

from datetime import timedelta

from demo_shop.reports.models import ReportLine
from inbox.contrib.joins import Join, joined_handler


@joined_handler(all_of=["payments.exported", "shipments.exported"], correlate="order", deadline=timedelta(hours=2))
def report_sale(join: Join) -> None:
    ReportLine.objects.create(order=join.run_id, amount=join["payments.exported"].payload["amount"])
