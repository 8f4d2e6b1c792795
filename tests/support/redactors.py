"""Functions for the options `REDACT` and `REDACT_ERRORS`."""

import re


def mask(topic, payload, headers):
    """Mask each value; keep the topic and the tenant for the tests to see."""
    return {**dict.fromkeys(payload, "masked"), "of": topic, "for": headers.get("tenant", "")}


def change_and_fail(topic, payload, headers):
    payload["seen"] = True
    raise ValueError(f"cannot redact {payload}")


def return_no_json(topic, payload, headers):
    return {1, 2}


NOT_CALLABLE = 5


def mask_ibans(text):
    """For `REDACT_ERRORS`."""
    return re.sub(r"DE\d{20}", "DE…", text)


def echo_and_fail(text):
    raise ValueError(f"cannot redact {text}")


def return_no_text(text):
    return None
