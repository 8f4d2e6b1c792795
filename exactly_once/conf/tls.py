"""TLS to a broker and to its management API: the options of `BROKER_SSL`, under the names of Python's `ssl`.

The certificate and the host name of the server are verified unless BROKER_SSL says otherwise. By default py-amqp does not
compare the host name, and kombu verifies nothing of a Redis.
"""

import ssl
from dataclasses import dataclass
from typing import Any

from exactly_once.wire.text import describe

_FILES = ("ca_certs", "certfile", "keyfile")


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The options of `BROKER_SSL`, with their defaults.

    Attributes:
        ca_certs: a file with the certificates of the authorities that are trusted; "": those of the system.
        certfile: a file with the client's certificate, and those that lead to its authority; "": none.
        keyfile: a file with the private key of `certfile`, not encrypted; "": `certfile` contains it.
        cert_reqs: `ssl.CERT_NONE` accepts any certificate.
        check_hostname: whether the certificate must be for the host of the URL.
        server_hostname: the name that the certificate must be for, instead of the host of the URL; for RabbitMQ only.
    """

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    cert_reqs: ssl.VerifyMode = ssl.CERT_REQUIRED
    check_hostname: bool = True
    server_hostname: str = ""

    def __post_init__(self) -> None:
        if self.keyfile and not self.certfile:
            raise ValueError("keyfile is the key of certfile, which is not set.")
        if self.server_hostname and not self.compares_names:
            raise ValueError("server_hostname is set, but the host name is not compared.")

    @property
    def compares_names(self) -> bool:
        return self.check_hostname and self.cert_reqs is not ssl.CERT_NONE

    def for_amqp(self, host: str) -> dict[str, Any]:
        """The argument `ssl` of py-amqp, which compares the host name if it is given one."""
        names = {"server_hostname": self.server_hostname or host} if self.compares_names else {}
        return {**self._given(), "cert_reqs": self.cert_reqs, **names}

    def for_redis(self) -> dict[str, Any]:
        """Arguments of redis-py's connection."""
        names = {"ssl_cert_reqs": self.cert_reqs, "ssl_check_hostname": self.compares_names}
        return {**{f"ssl_{name}": value for name, value in self._given().items()}, **names}

    def context(self) -> ssl.SSLContext:
        """As py-amqp makes one. Raises OSError or ValueError if a file or an option cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.compares_names
        context.verify_mode = self.cert_reqs
        if self.certfile:
            # An encrypted key would ask for its password on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile or None, password="")
        if self.ca_certs:
            context.load_verify_locations(self.ca_certs)
        else:
            context.load_default_certs()
        return context

    def why_unloadable(self) -> str:
        """Why this process cannot use the files, or ""."""
        if given := self._given():
            try:
                self.context()
            except (OSError, ValueError) as error:
                named = ", ".join(f"{name} {value!r}" for name, value in given.items())
                return f"BROKER_SSL cannot be used ({named}): {describe(error)}"
        return ""

    def _given(self) -> dict[str, str]:
        return {name: value for name in _FILES if (value := getattr(self, name))}


DEFAULT_TLS = TlsOptions()
