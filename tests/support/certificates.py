"""An authority of a test's own, and the certificates that it issues, by the program `openssl`."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Certificate(NamedTuple):
    certfile: str
    keyfile: str


class Authority:
    def __init__(self, directory, name="authority"):
        self._directory = directory
        self._own = Certificate(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
        made = ["-subj", f"/CN={name}", "-keyout", self._own.keyfile, "-out", self._own.certfile]
        self._openssl("req", "-x509", *NEW_KEY, *made, "-addext", "keyUsage=critical,keyCertSign,cRLSign")

    @property
    def ca_certs(self):
        return self._own.certfile

    def issue(self, host):
        """A certificate for a host, or for a client of this name."""
        issued = Certificate(*(str(self._directory / f"{host}.{kind}") for kind in ("pem", "key")))
        request, extensions = self._directory / f"{host}.csr", self._directory / f"{host}.ext"
        extensions.write_text(f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid\n")
        self._openssl("req", *NEW_KEY, "-subj", f"/CN={host}", "-keyout", issued.keyfile, "-out", str(request))
        signed = ["-CA", self._own.certfile, "-CAkey", self._own.keyfile, "-CAcreateserial", "-extfile", str(extensions)]
        self._openssl("x509", "-req", "-in", str(request), *signed, "-out", issued.certfile)
        return issued

    @staticmethod
    def _openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
