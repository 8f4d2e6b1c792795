"""Which messages are dropped when too many wait: above the limit, down to nine tenths of it, and droppable ones only."""

import logging

import pytest

from inbox import Shed
from inbox.handlers.handler import Handler
from inbox.limits import shedder as shedding_module
from inbox.limits.shedder import Shedder, shedder_of
from inbox.testing import make_message
from tests.support.deliveries import at_once


def a_handler(**shed):
    return Handler(name="tests.shedding", topics=("t",), function=print, biz_id=None, using="default", shed=Shed(**shed))


def a_message(**payload):
    return make_message("t", payload)


def dropped(shedder, messages=1000):
    """How many of `messages` messages are dropped before the next reading."""
    return sum(bool(shedder.why_shed(a_message())) for _ in range(messages))


@pytest.fixture
def shedder():
    return Shedder(a_handler(above=100))


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch):
    """Otherwise a reading could expire while the machine stalls, and nothing would be dropped."""
    now = shedding_module.monotonic()
    monkeypatch.setattr(shedding_module, "monotonic", lambda: now)


class TestWhenToDrop:
    @pytest.mark.parametrize(
        ("lags", "consumers", "expected"),
        [
            pytest.param([], 1, 0, id="nothing before the first reading"),
            pytest.param([100], 1, 0, id="nothing at the limit"),
            pytest.param([130], 1, 40, id="above the limit down to nine tenths of it"),
            pytest.param([101, 95], 1, 5, id="also below the limit once it has begun"),
            pytest.param([101, 90, 95, 100], 1, 0, id="nothing after it has ended at nine tenths"),
            pytest.param([101, 90, 95, 100, 101], 1, 11, id="again above the limit"),
            pytest.param([130], 4, 10, id="the share of one of several consumers"),
            pytest.param([130], 0, 40, id="an unknown number of consumers counts as one"),
        ],
    )
    def test_messages_above_the_limit_are_dropped_down_to_nine_tenths_of_it(self, shedder, lags, consumers, expected):
        for lag in lags:
            shedder.record_lag(lag, consumers=consumers)

        assert dropped(shedder) == expected

    def test_threads_share_the_excess(self, shedder):
        shedder.record_lag(290)

        assert sum(at_once([lambda: dropped(shedder, 100)] * 8)) == 200

    def test_nothing_is_dropped_after_the_reading_has_expired(self, shedder, monkeypatch):
        shedder.record_lag(1000)
        read_at = shedding_module.monotonic()
        monkeypatch.setattr(shedding_module, "monotonic", lambda: read_at + 6)

        assert dropped(shedder) == 0

    def test_the_begin_and_the_end_of_shedding_are_logged_once_each(self, shedder, caplog):
        with caplog.at_level(logging.WARNING):
            for lag in (101, 150, 99, 80, 70):
                shedder.record_lag(lag)

        assert [record.getMessage() for record in caplog.records] == [
            "handler tests.shedding: load shedding begins: 101 messages wait, the limit is 100.",
            "handler tests.shedding: load shedding ends: 80 messages wait, the limit is 100.",
        ]


class TestWhatToDrop:
    def test_only_droppable_messages_are_dropped(self):
        shedder = Shedder(a_handler(above=100, droppable=lambda message: message.payload["kind"] == "view"))
        shedder.record_lag(1000)

        assert shedder.why_shed(a_message(kind="view"))
        assert not shedder.why_shed(a_message(kind="order"))

    def test_messages_that_are_not_droppable_do_not_count_against_the_excess(self):
        shedder = Shedder(a_handler(above=100, droppable=lambda message: message.payload.get("kind") != "order"))
        shedder.record_lag(130)
        for _ in range(100):
            shedder.why_shed(a_message(kind="order"))

        assert dropped(shedder) == 40

    @pytest.mark.parametrize("error", [KeyError("kind"), SystemExit()])
    def test_messages_on_which_droppable_fails_are_kept_and_the_error_is_logged_once(self, error, caplog):
        def fail(message):
            raise error

        shedder = Shedder(a_handler(above=100, droppable=fail))
        shedder.record_lag(1000)

        with caplog.at_level(logging.ERROR):
            assert dropped(shedder) == 0
        assert caplog.text.count("droppable failed with") == 1

    def test_an_awaitable_answer_of_droppable_keeps_the_message(self, caplog):
        class Later:
            def __await__(self):
                yield

        shedder = Shedder(a_handler(above=100, droppable=lambda message: Later()))
        shedder.record_lag(1000)

        assert dropped(shedder) == 0
        assert "must return a bool" in caplog.text


class TestShedOption:
    def test_an_async_droppable_is_refused(self):
        async def droppable(message):
            return True

        with pytest.raises(TypeError, match="async"):
            Shed(droppable=droppable)

    def test_a_droppable_that_cannot_be_called_is_refused(self):
        with pytest.raises(TypeError, match="must be a function"):
            Shed(droppable=True)

    def test_a_handler_has_one_shedder_for_all_threads(self):
        handler = a_handler(above=100)

        assert len(set(map(id, at_once([lambda: shedder_of(handler)] * 5)))) == 1
