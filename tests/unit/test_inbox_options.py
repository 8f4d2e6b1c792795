"""The `INBOX` setting: its defaults, what it takes from the `OUTBOX` setting, and what it refuses."""

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from inbox.conf import InboxOptions, inbox_options


class TestDefaults:
    def test_the_default_is_16_retries_from_10_seconds_to_2_hours_apart(self):
        retry = InboxOptions().retry

        assert retry.max_attempts == 1 + 16
        assert timedelta(seconds=5) <= retry.delay(1) <= timedelta(seconds=10)
        assert timedelta(hours=1) <= retry.delay(16) <= timedelta(hours=2)

    def test_the_maximum_message_age_is_a_day_below_the_default_retention(self):
        assert InboxOptions().oldest_run == timedelta(days=364)

    def test_the_maximum_message_age_is_three_quarters_of_a_retention_of_a_few_days(self):
        assert InboxOptions(RETENTION=timedelta(hours=8)).oldest_run == timedelta(hours=6)


class TestFollowingTheOutbox:
    @override_settings(OUTBOX={"BROKER_URL": "amqp://b", "EXCHANGE": "shop"}, INBOX={})
    def test_broker_and_exchange_default_to_those_of_the_outbox(self):
        assert (inbox_options().broker_url, inbox_options().exchange) == ("amqp://b", "shop")

    @override_settings(OUTBOX={"BROKER_URL": "amqp://b"}, INBOX={"BROKER_URL": "amqp://c"})
    def test_the_inbox_may_have_a_broker_of_its_own(self):
        assert inbox_options().broker_url == "amqp://c"

    @override_settings(OUTBOX=None, INBOX=None)
    def test_without_settings_the_broker_is_local(self):
        assert inbox_options().broker_url == "local://"

    @override_settings(ROOT_URLCONF="shop.urls", INBOX={})
    def test_the_group_defaults_to_the_project_name(self):
        assert inbox_options().group == "shop"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"MAX_ATEMPTS": 3}, "Did you mean 'MAX_ATTEMPTS'"),
        ({"MAX_ATTEMPTS": 0}, "greater than zero"),
        ({"BACKOFF": (timedelta(2), timedelta(1))}, "BACKOFF must be two durations"),
        ({"BACKOFF": (timedelta(2), timedelta.max)}, "of at most a century"),
        ({"DUPLICATE_TIMEOUT": timedelta()}, "greater than zero"),
        ({"QUEUE_TYPE": "stream"}, "'quorum' or 'classic'"),
        ({"LEASE_STORE": "memcached://:secret@host"}, "it must be 'database' or a URL"),
        (
            {"MANAGEMENT_URL": "amqp://user:secret@host"},
            "MANAGEMENT_URL is 'amqp://[^s]*@host': it must be a URL like http",
        ),
        ({"AROUND": "shop.tenants.around"}, "list or tuple"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_reason(given, words):
    with override_settings(INBOX=given), pytest.raises(ImproperlyConfigured, match=words):
        inbox_options()
