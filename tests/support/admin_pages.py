"""Pages in the admin, as a browser and a member of staff see them.

Messages and lists are those of the outbox; `Page`, `staff_client` and `said` are for the pages of both apps.
"""

import hashlib
import json
import uuid
from datetime import date, timedelta
from html.parser import HTMLParser
from itertools import count

from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse

from exactly_once.process.clock import utcnow
from exactly_once.sql.days import LIVE
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox.models import OutboxMessage
from outbox.states import GIVEN_UP, SETTLED, State
from outbox.store.unique import take_names
from tests.support.admin_names import LIST
from tests.support.inbox_rows import store_message

_IDS = count(uuid.uuid4().int >> 8)
"""In the order in which they are made."""
NASTY = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;b&gt;"


class Page(HTMLParser):
    """What a browser would make of it: elements with their attributes, and the text outside of scripts."""

    def __init__(self, response):
        super().__init__()
        assert response.status_code == 200, response
        self.elements, self.text = [], ""
        self.feed(response.content.decode())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag, **attributes):
        return [found for name, found in self.elements if name == tag and all(found.get(k) == v for k, v in attributes.items())]

    @property
    def shape(self):
        """Every element with the names of its attributes."""
        return [(tag, *attributes) for tag, attributes in self.elements]


def staff_client(*codenames):
    """A client of a member of staff with these permissions and no others."""
    user = User.objects.create_user(f"staff{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def superuser_client():
    """A client of a user with every permission."""
    client = Client()
    client.force_login(User.objects.create_superuser(f"operator{User.objects.count()}"))
    return client


def a_message(state=State.READY, *, ago=timedelta(), due_ago=None, payload=None, using="default", **columns):
    at = utcnow() - ago
    values = {
        "topic": "shop.order.placed",
        "biz_id": f"order-{OutboxMessage.objects.using(using).count()}",
        "shard": 1,
        "body": json.dumps(payload if payload is not None else {"order": 1}).encode(),
        "created_at": at,
        "available_at": at if due_ago is None else utcnow() - due_ago,
        "day": day_of(state),
        "message_id": uuid.UUID(int=next(_IDS)),
        **columns,
    }
    row = OutboxMessage(state=state, **values)
    if row.is_unique and state not in GIVEN_UP:
        take_names(using, [row])
    row.save(using=using, force_insert=True)
    return row


def an_inbox_message(state=InboxState.DEAD, *, payload=None, received_ago=timedelta(), next_ago=None, **columns):
    body = json.dumps(payload if payload is not None else {"order": 1}).encode()
    values = {
        "handler": "shop.reserve_stock",
        "topic": "shop.order.placed",
        "biz_id": f"order-{InboxMessage.objects.count()}",
        "message_id": str(uuid.uuid4()),
        "content_type": "application/json",
        "body": body,
        "digest": hashlib.sha256(body).hexdigest(),
        "received_at": utcnow() - received_ago,
        "next_attempt_at": None if next_ago is None else utcnow() - next_ago,
        **columns,
    }
    return store_message(state=state, **values)


def day_of(state):
    """For a row whose state is set by hand."""
    return (utcnow().date() - date(1970, 1, 1)).days if state in SETTLED else LIVE


def changed(row, state):
    """As another process does it in the meantime."""
    OutboxMessage.objects.filter(pk=row.pk).update(state=state, day=day_of(state))


def listed(client, page=LIST, **query):
    """The primary keys in a list, in its order."""
    response = client.get(reverse(page), query)
    assert response.status_code == 200
    return [row.pk for row in response.context["cl"].result_list]


def shown(client, **query):
    """The primary keys in the list of all."""
    return set(listed(client, **query))


def act(client, action, *rows, page=LIST, query="", **fields):
    data = {"action": action, "_selected_action": [row.pk for row in rows], **fields}
    return client.post(reverse(page) + query, data)


def previewed(response):
    """The field that confirms the operation of this preview."""
    return {field["name"]: field["value"] for field in Page(response).all("input", name="plan_confirmed")}


def act_on_all(client, action, *, page=LIST, query="", **fields):
    """Preview an action on all rows that match the list's filters, and confirm it."""
    (row, *_) = client.get(reverse(page) + query).context["cl"].result_list
    preview = act(client, action, row, page=page, query=query, select_across="1")
    return act(client, action, row, page=page, query=query, select_across="1", **previewed(preview), **fields)


def said(response):
    return [(message.level_tag, message.message) for message in get_messages(response.wsgi_request)]


def state_of(row):
    return OutboxMessage.objects.get(pk=row.pk).state
