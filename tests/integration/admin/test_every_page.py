"""Every page of the admin with a text from outside wherever one is stored: it is shown as text, and makes no element."""

import pytest
from django.db import transaction
from django.urls import reverse

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.models import Flow
from tests.support.admin_actions import PAGES
from tests.support.admin_pages import NASTY, Page
from tests.support.shop_day import hostile_rows

pytestmark = pytest.mark.django_db(databases=["default", "other"])

HARMLESS = "harm/less"
"""As often broken into lines."""
OF_THE_SERVER = {"exactly_once.DatabaseHealth"}
"""Pages whose rows are sessions of the server, which change from one request to the next."""


def paths_of(label, text):
    """The list, which is that of a chain on the page of flows, and the page of each row."""
    model = PAGES[label].model
    page = f"admin:{model._meta.app_label}_{model._meta.model_name}"
    yield reverse(f"{page}_changelist", query={"id": text} if model is Flow else None)
    if not isinstance(PAGES[label], PageAdmin):
        for row in model.objects.order_by("pk"):
            yield reverse(f"{page}_change", args=[row.pk])


@pytest.mark.parametrize("label", sorted(PAGES.keys() - OF_THE_SERVER))
def test_text_from_outside_adds_no_element_or_attribute(label, admin_client):
    shapes = []
    for text in (HARMLESS, NASTY):
        with transaction.atomic():
            hostile_rows(text)
            pages = [Page(admin_client.get(path, follow=True)) for path in paths_of(label, text)]
            transaction.set_rollback(True)
        assert any(text in page.text for page in pages)
        shapes.append(sorted([element for element in page.shape if element != ("wbr",)] for page in pages))

    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("label", sorted(label for label, page in PAGES.items() if page.list_filter))
def test_every_choice_of_a_filter_opens(label, admin_client):
    model = PAGES[label].model
    address = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
    for _title, choices, _chosen in admin_client.get(address).context["cl"].filter_bar:
        for choice in choices:
            response = admin_client.get(f"{address}{choice['query_string']}")
            assert response.status_code == 200, choice
            assert "e=1" not in response.request["QUERY_STRING"]
