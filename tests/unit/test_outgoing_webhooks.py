"""Parts of outgoing webhooks without a server: addresses, the pause that an endpoint asks for."""

import socket
from datetime import timedelta
from email.utils import format_datetime

import pytest

from exactly_once.process.clock import utcnow
from inbox.conf import InboxOptions
from inbox.contrib.outgoing_webhooks.addresses import NotAllowed, allowed_addresses, networks
from inbox.contrib.outgoing_webhooks.delivering import retry_after

PUBLIC = ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"]
NOT_PUBLIC = [
    "127.0.0.1",
    "127.8.9.10",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fd00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.1.2.3",
    "::127.0.0.1",
    "64:ff9b::a01:203",
    "64:ff9b:1::a01:203",
    "2002:a01:203::1",
    "::ffff:0:a01:203",
    "fec0::1",
]


@pytest.fixture
def resolves(monkeypatch):
    def to(*addresses):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **options: [(0, 0, 0, "", (one, 443)) for one in addresses])

    return to


def addresses(*, is_encrypted=True, private=()):
    return allowed_addresses("hooks.example", 443, is_encrypted=is_encrypted, private=networks(private))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_is_allowed_for_encrypted_requests_only(resolves, address):
    resolves(address)
    assert addresses() == [address]
    with pytest.raises(NotAllowed, match="http:// is allowed for private networks only"):
        addresses(is_encrypted=False)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_address_that_is_not_public_is_refused_and_not_named(resolves, address):
    resolves(address)
    with pytest.raises(NotAllowed, match="none is public") as refused:
        addresses()
    assert f" {address}" not in str(refused.value)


def test_of_several_addresses_only_the_public_ones_are_used(resolves):
    resolves("10.1.2.3", PUBLIC[0], PUBLIC[0], PUBLIC[1], "::1")
    assert addresses() == PUBLIC


def test_listed_network_is_allowed_also_unencrypted_and_no_other(resolves):
    resolves("10.1.2.3", "10.2.0.1", PUBLIC[0])
    assert addresses(private=["10.1.0.0/16"]) == ["10.1.2.3", PUBLIC[0]]
    assert addresses(is_encrypted=False, private=["10.1.0.0/16"]) == ["10.1.2.3"]


def test_setting_with_a_network_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match=r"WEBHOOK_NETWORKS contains '10.1.2.3/16': it must be a network"):
        InboxOptions(WEBHOOK_NETWORKS=("10.1.2.3/16",))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("0", 1),
        ("7", 7),
        ("99999999999999999999", 3600),
        (" 30 ", 30),
        ("-5", None),
        ("soon", None),
        ("", None),
        pytest.param("9" * 5000, None, id="number with too many digits"),
        ("Wed, 21 Oct 2026 07:28:00 +99999999999999999999", None),
        ("Wed, 21 Oct 99999999999999999999999 07:28:00 GMT", None),
    ],
)
def test_pause_is_bounded_and_an_unreadable_one_is_ignored(given, seconds):
    pause = retry_after({"retry-after": given})
    assert pause == (None if seconds is None else timedelta(seconds=seconds))


@pytest.mark.parametrize(("after", "least", "most"), [(-60, 1, 1), (60, 55, 60), (10**6, 3600, 3600)])
def test_pause_until_a_date_is_bounded(after, least, most):
    pause = retry_after({"retry-after": format_datetime(utcnow() + timedelta(seconds=after), usegmt=True)})
    assert timedelta(seconds=least) <= pause <= timedelta(seconds=most)
