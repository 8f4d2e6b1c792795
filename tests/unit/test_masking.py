"""What messages show of a setting that may hold a password."""

from urllib.parse import quote

import hypothesis
import pytest
from hypothesis import strategies as st

from exactly_once.conf.masking import masked, masked_path, quoted
from outbox.conf import OutboxOptions

SECRET = "Xy7secret7yX"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:secret@host:5672/vhost", "amqp://***@host:5672/vhost"),
        ("amqp://user:se@cr:et@host//", "amqp://***@host//"),
        ("amqp://us%40er:secret@[::1]:5672/a%2Fb", "amqp://***@[::1]:5672/a%2Fb"),
        ("redis://:secret@host/0", "redis://***@host/0"),
        ("redis://secret@host/0", "redis://***@host/0"),
        ("redis://secret:@host/0", "redis://***@host/0"),
        ("rediss://host:6379/0?password=secret", "rediss://host:6379/0?***"),
        ("unix://:secret@/run/redis.sock?db=1", "unix://***@/run/redis.sock?***"),
        ("sqs://key:secret@", "sqs://***@"),
        ("https://example.com/services/T024BE7LD?token=secret", "https://example.com/services/***?***"),
        ("sqla+sqlite:///celery.sqlite3", "sqla+sqlite:///celery.sqlite3"),
        ("amqp://host//", "amqp://host//"),
        ("local://", "local://"),
        ("amqp://one:first@a:5672//;amqp://two:second@b:5672//", "amqp://***@a:5672//;amqp://***@b:5672//"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url, shown):
    assert masked(url) == repr(shown)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("", ""),
        ("/", "/"),
        ("/v1/shop-events/hook2/sendMessage.json", "/v1/shop-events/hook2/sendMessage.json"),
        ("/services/T024BE7LD/XnVx8vR2qkTq0a1b2c3d4e5f", "/services/***/***"),
        ("/api/webhooks/123456789012345678/abc-DEF_123", "/api/webhooks/***/***"),
        ("/catch/8f14e45f-ceea-467f-a8f0-bf28e3f1a2b3/abc12d/", "/catch/***/***/"),
        ("/bot110201543:AAHdqTcvCH1vGWJxfSeof/sendMessage", "/***/sendMessage"),
        ("/averyverylongsegmentoflettersonly", "/***"),
    ],
)
def test_path_of_an_http_url_is_shown_without_what_may_be_a_secret(path, shown):
    assert masked_path(path) == shown


@pytest.mark.parametrize(
    "value",
    [
        ["amqp://user:secret@host"],
        ("amqp://user:secret@host",),
        {"url": "amqp://user:secret@host"},
        b"amqp://user:secret@host",
        "amqp:/user:secret@host",
        "user:secret@host",
        "secret",
        "",
        "amqp://user:sec/ret@host",
        "amqp://user:sec?ret@host",
        "amqp://user:sec#ret@host",
        "amqp://user:123/ret@host",
        "redis://:123?ret@host",
        "amqp://user:sec;ret@host",
        "amqp://user:12;ret@host",
        "amqp://user:12;secret://ret@host",
        "amqp:///user:secret@host",
        "amqp://user:secret",
        "user:secret@host://",
        "amqp://host/user:secret",
        "amqp://host//;",
        "amqp://user:secret@host;password=secret",
    ],
)
def test_only_the_type_of_a_value_that_is_not_a_url_is_shown(value):
    article, _, kind = masked(value).partition(" (not shown")[0].partition(" ")

    assert (article, kind) == ("a", type(value).__name__)


ODD = "/?#@:;&=%+ []\\'\"\n\t\x00é℀"
AROUND = st.text(alphabet=ODD + "a1", max_size=6)
TEMPLATES = st.sampled_from(
    [
        "{scheme}://{user}:{secret}@host:5672/vhost",
        "{scheme}://:{secret}@host/0",
        "{scheme}://{user}:{secret}@",
        "{scheme}://{secret}@host/0",
        "{scheme}:/{user}:{secret}@host",
        "{scheme}:{user}:{secret}@host",
        "{user}:{secret}@host",
        "//{user}:{secret}@host",
        "{scheme}://host?password={secret}",
        "{scheme}://host/0?x=1&password={secret}#{secret}",
        "{scheme}://host;password={secret}",
        "{scheme}://a:b@host//;{scheme}://{user}:{secret}@host//",
        "{scheme}://a:b@host//;{user}:{secret}@host//",
    ]
)
SCHEMES = st.sampled_from(["amqp", "amqps", "redis", "sqs", "sqla+postgresql", "unix", "ampq", "", "AMQP"])


@pytest.mark.long
@hypothesis.given(TEMPLATES, SCHEMES, AROUND, AROUND, AROUND)
@hypothesis.settings(max_examples=600)
def test_no_spelling_of_a_url_shows_the_password(template, scheme, user, before, after):
    """Also not when its special characters are not escaped."""
    url = template.format(scheme=scheme, user=user, secret=f"{before}{SECRET}{after}")

    assert SECRET not in masked(url)
    assert SECRET not in quoted(url)


@hypothesis.given(st.text(min_size=1), SCHEMES.filter(bool))
def test_an_escaped_password_leaves_the_rest_of_the_url_readable(password, scheme):
    url = f"{scheme}://user:{quote(password.encode('utf-8', 'replace'), safe='')}@host:5672/vhost"

    assert masked(url) == f"'{scheme}://***@host:5672/vhost'"


def test_options_shown_by_a_debugger_hide_the_broker_url():
    assert "secret" not in repr(OutboxOptions(BROKER_URL="amqp://user:secret@host//"))
