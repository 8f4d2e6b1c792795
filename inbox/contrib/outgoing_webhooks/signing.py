"""The signature of a request, by the Standard Webhooks specification with a symmetric secret (`v1`).

The receiver verifies the id, the time and the body, as `outbox.contrib.incoming_webhooks.StandardWebhooks` does. The id is the
same in every attempt, so the receiver deduplicates on it. The time is that of the attempt.
"""

import base64
import hashlib
import hmac
import secrets as random_bytes
from collections.abc import Sequence
from datetime import datetime

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    return _PREFIX + base64.b64encode(random_bytes.token_bytes(_SECRET_BYTES)).decode()


def signed_headers(message_id: str, body: bytes, secrets: Sequence[str], at: datetime) -> dict[str, str]:
    """The headers `webhook-id`, `webhook-timestamp` and `webhook-signature`, which has a signature by each secret."""
    timestamp = str(int(at.timestamp()))
    signed = b".".join([message_id.encode(), timestamp.encode(), body])
    signatures = (hmac.digest(base64.b64decode(secret.removeprefix(_PREFIX)), signed, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{base64.b64encode(signature).decode()}" for signature in signatures),
    }
