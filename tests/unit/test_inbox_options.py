"""The `INBOX` setting: its defaults, where it follows the outbox, and what it refuses."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from inbox.conf import InboxOptions, inbox_options


class TestDefaults:
    def test_there_are_sixteen_retries_between_ten_seconds_and_two_hours(self):
        retry = InboxOptions().retry

        assert retry.max_attempts == 1 + 16
        assert timedelta(seconds=5) <= retry.delay(1) <= timedelta(seconds=10)
        assert timedelta(hours=1) <= retry.delay(16) <= timedelta(hours=2)

    def test_the_age_fence_stands_a_day_before_the_purge(self):
        assert InboxOptions().oldest_run == timedelta(days=29)


class TestFollowingTheOutbox:
    @override_settings(OUTBOX={"BROKER_URL": "amqp://b", "EXCHANGE": "shop"}, INBOX={})
    def test_a_service_says_its_broker_once(self):
        assert (inbox_options().broker_url, inbox_options().exchange) == ("amqp://b", "shop")

    @override_settings(OUTBOX={"BROKER_URL": "amqp://b"}, INBOX={"BROKER_URL": "amqp://c"})
    def test_it_may_receive_from_elsewhere(self):
        assert inbox_options().broker_url == "amqp://c"

    @override_settings(OUTBOX=None, INBOX=None)
    def test_without_any_setting_there_is_no_broker_at_all(self):
        assert inbox_options().broker_url == "local://"

    @override_settings(ROOT_URLCONF="shop.urls", INBOX={})
    def test_the_group_is_the_projects_name(self):
        assert inbox_options().group == "shop"


class TestRefusing:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"MAX_ATEMPTS": 3}, "Did you mean 'MAX_ATTEMPTS'"),
            ({"MAX_ATTEMPTS": 0}, "greater than zero"),
            ({"MAX_ATTEMPTS": True}, "int"),
            ({"RETRY_BASE": 10}, "timedelta"),
            ({"TWIN_TIMEOUT": timedelta()}, "greater than zero"),
            ({"QUEUE_TYPE": "stream"}, "'quorum' or 'classic'"),
            ({"LEASE_STORE": "memcached://:secret@host"}, "it must be 'database' or a URL"),
            ({"RETENTION": timedelta(hours=1)}, "AGE_FENCE_MARGIN"),
            ({"ACCEPT": "application/json"}, "list or tuple"),
            ([], "must be a dict"),
        ],
    )
    def test_it_says_what_is_wrong(self, given, words):
        with override_settings(INBOX=given), pytest.raises(ImproperlyConfigured, match=words):
            inbox_options()
