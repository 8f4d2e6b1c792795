"""Webhook signatures: the vectors that the specifications publish, and what is refused."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http.request import HttpHeaders

from outbox.contrib.incoming_webhooks import GitHub, InvalidSignature, StandardWebhooks, Stripe, signatures

STANDARD_SECRET = "whsec_plJ3nmyCDGBKInavdOK15jsl"
STANDARD_BODY = b'{"event_type":"ping","data":{"success":true}}'
STANDARD = {
    "webhook-id": "msg_loFOjxBNrRLzqYUf",
    "webhook-timestamp": "1731705121",
    "webhook-signature": "v1,rAvfW3dJ/X/qxhsaXPOyyCGmRKsaKWcsNccKXlIktD0=",
}
"""The example of the specification."""

LIBRARY_SECRET = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LIBRARY_BODY = b'{"test": 2432232314}'
LIBRARY = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
"""The vector in the tests of the specification's libraries."""

STRIPE_SECRET = "whsec_test_1"
STRIPE_BODY = b'{"id":"evt_1","object":"event"}'
STRIPE_SIGNATURE = "02b92e5c56c4005d5ab8bc258d22269cc276a826596ba35b423d1ea3d371fdf8"
STRIPE = {"Stripe-Signature": f"t=1730000000,v1={STRIPE_SIGNATURE}"}
"""Stripe publishes none. Computed by `openssl dgst -sha256 -hmac whsec_test_1` of the timestamp, a dot and the body."""

GITHUB_SECRET = "It's a Secret to Everybody"
GITHUB_BODY = b"Hello, World!"
GITHUB = {"X-Hub-Signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
"""The example of GitHub's documentation."""

VECTORS = [
    pytest.param(StandardWebhooks, STANDARD_SECRET, STANDARD_BODY, STANDARD, 1731705121, id="standard"),
    pytest.param(StandardWebhooks, LIBRARY_SECRET, LIBRARY_BODY, LIBRARY, 1614265330, id="standard-library"),
    pytest.param(Stripe, STRIPE_SECRET, STRIPE_BODY, STRIPE, 1730000000, id="stripe"),
    pytest.param(GitHub, GITHUB_SECRET, GITHUB_BODY, GITHUB, 0, id="github"),
]
TIMED = VECTORS[:3]
OTHER_SECRET = base64.b64encode(b"another secret of the provider").decode()


@pytest.fixture
def at(monkeypatch):
    """Set the clock of this machine, in seconds since the epoch."""

    def at(seconds):
        monkeypatch.setattr(signatures, "utcnow", lambda: datetime.fromtimestamp(seconds, UTC))

    return at


def headers(given):
    """As a request has them: their names are case-insensitive."""
    return HttpHeaders({f"HTTP_{name.upper().replace('-', '_')}": value for name, value in given.items()})


@pytest.mark.parametrize(("scheme", "secret", "body", "given", "now"), VECTORS)
def test_published_vector_is_accepted(scheme, secret, body, given, now, at):
    at(now)

    for secrets in ([secret], [OTHER_SECRET, secret], [secret, OTHER_SECRET]):  # also while they are rotated
        assert scheme(*secrets)(body, headers(given)) is True


@pytest.mark.parametrize(("scheme", "secret", "body", "given", "now"), VECTORS)
def test_other_bytes_and_another_secret_are_refused(scheme, secret, body, given, now, at):
    at(now)

    with pytest.raises(InvalidSignature, match="no signature matches the body"):
        scheme(secret)(body + b" ", headers(given))
    with pytest.raises(InvalidSignature, match="no signature matches the body"):
        scheme(OTHER_SECRET)(body, headers(given))


@pytest.mark.parametrize(("scheme", "secret", "body", "given", "now"), VECTORS)
def test_each_header_is_required(scheme, secret, body, given, now, at):
    at(now)

    for name in given:
        with pytest.raises(InvalidSignature, match=f"the header {name} is missing"):
            scheme(secret)(body, headers({other: value for other, value in given.items() if other != name}))


@pytest.mark.parametrize(("scheme", "secret", "body", "given", "now"), VECTORS)
@pytest.mark.parametrize("nonsense", ["nonsense", "v1,", "v1=", "t=,v1=", "ü", "v1,ü", "sha256=", ",", "="])
def test_signature_header_of_another_form_is_refused(scheme, secret, body, given, now, at, nonsense):
    at(now)

    with pytest.raises(InvalidSignature):
        scheme(secret)(body, headers({**given, [*given][-1]: nonsense}))


@pytest.mark.parametrize(("scheme", "secret", "body", "given", "now"), TIMED)
@pytest.mark.parametrize("seconds", [-301, 301])
def test_timestamp_outside_of_the_tolerance_is_refused(scheme, secret, body, given, now, at, seconds):
    at(now + seconds)

    with pytest.raises(InvalidSignature, match="the timestamp differs by more than 0:05:00"):
        scheme(secret)(body, headers(given))
    assert scheme(secret, tolerance=timedelta(minutes=6))(body, headers(given))


@pytest.mark.parametrize("timestamp", ["soon", "-1", "1e9", "1_731_705_121", "١٧٣١٧٠٥١٢١", " 1731705121"])
def test_signed_timestamp_that_is_not_a_number_is_refused(timestamp, at):
    at(1731705121)
    signed = f"{STANDARD['webhook-id']}.{timestamp}.".encode() + STANDARD_BODY
    key = base64.b64decode(STANDARD_SECRET.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()

    with pytest.raises(InvalidSignature, match="the timestamp is not a number of seconds"):
        StandardWebhooks(STANDARD_SECRET)(
            STANDARD_BODY, headers({**STANDARD, "webhook-timestamp": timestamp, "webhook-signature": f"v1,{signature}"})
        )


def test_one_of_several_signatures_has_to_match_and_other_versions_are_ignored(at):
    at(1731705121)
    matching = STANDARD["webhook-signature"]
    stripe = f"t=1730000000,v0={STRIPE_SIGNATURE},v1={'0' * 64}"

    several = {**STANDARD, "webhook-signature": f"v1a,{'A' * 88} v1,{'A' * 44} {matching}"}
    assert StandardWebhooks(STANDARD_SECRET)(STANDARD_BODY, headers(several))
    with pytest.raises(InvalidSignature):
        StandardWebhooks(STANDARD_SECRET)(
            STANDARD_BODY, headers({**STANDARD, "webhook-signature": matching.replace("v1,", "v2,")})
        )

    at(1730000000)
    assert Stripe(STRIPE_SECRET)(STRIPE_BODY, headers({"Stripe-Signature": f"{stripe},v1={STRIPE_SIGNATURE}"}))
    with pytest.raises(InvalidSignature):
        Stripe(STRIPE_SECRET)(STRIPE_BODY, headers({"Stripe-Signature": stripe}))


@pytest.mark.parametrize("scheme", [StandardWebhooks, Stripe, GitHub])
@pytest.mark.parametrize("secrets", [(), (None,), ("",), (" ",), (b"c2VjcmV0",), (STANDARD_SECRET, "")])
def test_missing_or_blank_secret_is_refused_when_the_verifier_is_made(scheme, secrets):
    with pytest.raises(ImproperlyConfigured, match=rf"{scheme.__name__}\(\)"):
        scheme(*secrets)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_not base64", "whsec_ü", "abc"])
def test_secret_of_standard_webhooks_that_is_not_base64_is_refused_and_not_shown(secret):
    with pytest.raises(ImproperlyConfigured) as refused:
        StandardWebhooks(secret)

    assert "a secret is not base64" in str(refused.value)
    assert secret not in str(refused.value).replace('"whsec_…"', "")


@pytest.mark.long
@pytest.mark.parametrize("scheme", [StandardWebhooks, Stripe])
@pytest.mark.parametrize("tolerance", [timedelta(), timedelta(seconds=-1), 300, None])
def test_tolerance_that_is_not_a_positive_duration_is_refused(scheme, tolerance):
    with pytest.raises(ImproperlyConfigured, match="tolerance is"):
        scheme(STANDARD_SECRET, tolerance=tolerance)


@pytest.mark.long
def test_verifier_does_not_show_its_secret():
    for verifier in (StandardWebhooks(STANDARD_SECRET), Stripe(STRIPE_SECRET), GitHub(GITHUB_SECRET)):
        assert "ecret" not in repr(verifier)
        assert "whsec" not in repr(verifier)
