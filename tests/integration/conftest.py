from __future__ import annotations

import pytest

from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import connected


@pytest.fixture
def peer():
    """A broker that does what the test tells it."""
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def transport(peer):
    """Connected to `peer`."""
    with connected(peer.url) as transport:
        yield transport
