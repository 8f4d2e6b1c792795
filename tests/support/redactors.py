"""Functions for `OUTBOX["REDACT"]` and `INBOX["REDACT"]`."""


def mask(topic, payload, headers):
    """Mask each value; keep the topic and the tenant for the tests to see."""
    return {**dict.fromkeys(payload, "masked"), "of": topic, "for": headers.get("tenant", "")}


def change_and_fail(topic, payload, headers):
    payload["seen"] = True
    raise ValueError(f"cannot redact {payload}")


def return_no_json(topic, payload, headers):
    return {1, 2}


NOT_CALLABLE = 5
