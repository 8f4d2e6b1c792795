"""The frozen vectors of the wire format."""

from datetime import datetime

from exactly_once.wire.envelope import Envelope
from tests.support import ROOT

VECTORS = ROOT / "tests" / "vectors"
INSTANTS = {"created_at", "deliver_at"}


def envelope_of(vector):
    values = {name: datetime.fromisoformat(value) if name in INSTANTS else value for name, value in vector["envelope"].items()}
    return Envelope(body=vector.get("decoded_body", vector["body"]).encode(), **values)
