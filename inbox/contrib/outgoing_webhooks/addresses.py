"""Which URLs an endpoint may have, and which addresses a request may be sent to.

An endpoint's URL comes from outside, and its host may resolve to any address. A request to a private one would reach services
that trust this network (server-side request forgery). So the host is resolved once, its addresses are checked, and the
connection is made to a checked address: a second answer of the name server (DNS rebinding) has no effect.
"""

import socket
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from django.utils.translation import gettext

from exactly_once.conf.masking import masked_path
from exactly_once.wire.text import why_unfit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_TRANSLATED = IPv6Network("::ffff:0:0:0/96")
_LOCAL = [IPv6Network("fec0::/10"), IPv6Network("64:ff9b:1::/48")]
"""Site-local addresses (RFC 3879) and those of a network's own NAT64 (RFC 8215), which Python 3.11 calls global."""
_LAST_32_BITS = 0xFFFFFFFF
LONGEST_URL = 2000
_PORTS = {"http": 80, "https": 443}


def why_no_url(url: str) -> str | None:
    """Why requests cannot be sent to `url`, for the operator who enters it; None if they can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return gettext("It is not a URL.")
    if parts.scheme not in _PORTS or not parts.hostname:
        return gettext("It must be a URL like https://example.com/webhooks.")
    if not url.isascii() or " " in url or why_unfit(url, limit=LONGEST_URL):
        return gettext(
            "It must have ASCII characters only, without spaces. Write others percent-encoded, and the host in Punycode."
        )
    if parts.username is not None or parts.password is not None:
        return gettext("It must not contain a user or a password.")
    if parts.fragment or port == 0:
        return gettext("It must not have a fragment, and its port must not be 0.")
    return None


def port_of(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]


def shown(url: str) -> str:
    """The URL without what may be a secret: its query, and parts of its path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{masked_path(parts.path)}{'?…' if parts.query else ''}"


class NotAllowed(Exception):
    """The host has no address that requests may be sent to."""


def networks(given: Sequence[str]) -> list[Network]:
    """Raises ValueError if one is not a network."""
    return [ip_network(text) for text in given]


def allowed_addresses(host: str, port: int, *, is_encrypted: bool, private: Sequence[Network]) -> list[str]:
    """The addresses of `host` that may be connected to, in the resolver's order.

    Args:
        is_encrypted: the URL is https. Unencrypted requests are sent to `private` addresses only.
        private: networks that are allowed although they are not public.

    Raises:
        NotAllowed: there is none.
        OSError: the host cannot be resolved.
    """
    found = list(dict.fromkeys(str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    allowed = [text for text in found if _is_allowed(ip_address(text), is_encrypted=is_encrypted, private=private)]
    if not allowed:
        # The addresses are not named: the owner of the endpoint may read this, and would learn about our network.
        why = "none is public" if is_encrypted else "http:// is allowed for private networks only"
        raise NotAllowed(
            f"The host {host} has no address that requests may be sent to: {why}. If it is right, add its network to "
            'INBOX["WEBHOOK_NETWORKS"].'
        )
    return allowed


def _is_allowed(address: Address, *, is_encrypted: bool, private: Sequence[Network]) -> bool:
    if any(address in network for network in private):
        return True
    return is_encrypted and all(map(_is_public, (address, *_embedded(address))))


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast and not any(address in network for network in _LOCAL)


def _embedded(address: Address) -> Iterator[IPv4Address]:
    """The IPv4 addresses that gateways may translate an IPv6 address to."""
    if not isinstance(address, IPv6Address):
        return
    if address.ipv4_mapped:
        yield address.ipv4_mapped
    if address.sixtofour:
        yield address.sixtofour
    if address.teredo:
        yield from address.teredo
    if any(address in network for network in (_NAT64, _COMPATIBLE, _TRANSLATED)):
        yield IPv4Address(int(address) & _LAST_32_BITS)
