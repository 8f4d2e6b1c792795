"""Token caches: processes that share a rate never use more than it, and hardly less."""

import random

import pytest

from inbox.limits.limiter import TokenCache
from inbox.store.buckets import refill_and_take


class TestTokenCache:
    def test_each_portion_expires_at_its_own_time(self):
        cache = TokenCache(2000.0)
        cache.add(7, left=0.0, now=1.0)
        cache.add(5, left=0.0, now=1.06)

        assert cache.take(1, now=1.07) == 1
        assert cache.tokens(now=1.0 + cache.lifetime + 0.001) == 5
        assert cache.tokens(now=1.06 + cache.lifetime + 0.001) == 0

    def test_more_tokens_are_wanted_before_a_large_portion_is_used_up(self):
        cache = TokenCache(2000.0)
        cache.portion = 8
        cache.add(8, left=0.0, now=1.0)
        assert not cache.wants_more(now=1.01)

        cache.take(4, now=1.01)

        assert cache.wants_more(now=1.01)

    def test_the_portion_does_not_double_when_the_bucket_had_no_more(self):
        cache = TokenCache(2000.0)
        cache.add(1, left=5.0, now=1.0)
        cache.take(2, now=1.01)
        assert cache.portion == 2

        cache.add(1, left=0.5, now=1.02)
        cache.take(2, now=1.03)

        assert cache.portion == 2

    @pytest.mark.parametrize(("rate", "earliest", "latest"), [(2000.0, 0.05, 0.06), (2.0, 0.5, 0.51), (5 / 3600, 5.0, 5.0)])
    def test_the_next_lease_is_due_when_an_empty_bucket_has_filled_a_portion(self, rate, earliest, latest):
        cache = TokenCache(rate)
        cache.add(0, left=0.0, now=0.0)

        assert earliest <= cache.next_lease_at <= latest


def shared(rate, speeds, *, seconds, roundtrip=0.003, poll=0.005):
    """What processes with these `speeds` (messages a second each) use of a shared `rate`: how many each, and when.

    A simulation in steps of a millisecond. They always have work; one with speed None uses every token at once.
    """
    purses = [TokenCache(rate) for _ in speeds]
    level, filled_at = purses[0].burst, 0.0
    free_at, polled_at = [0.0] * len(speeds), [0.0] * len(speeds)
    coming, wants = [None] * len(speeds), [False] * len(speeds)
    used, uses = [0] * len(speeds), []
    order = list(range(len(speeds)))
    for now in (step / 1000 for step in range(int(seconds * 1000))):
        random.shuffle(order)
        for one in order:
            cache, speed = purses[one], speeds[one]
            if coming[one] and coming[one][0] <= now:
                _, leased = coming[one]
                coming[one] = None
                cache.add(leased.tokens, leased.left, now)
            while max(free_at[one], polled_at[one]) <= now:
                taken = cache.take(1, now)
                wants[one] = not taken or cache.wants_more(now)
                if taken:
                    used[one] += 1
                    uses.append((now, 1))
                    free_at[one] = now if speed is None else max(free_at[one], now - 0.001) + 1 / speed
                    continue
                polled_at[one] = now + poll
            if wants[one] and coming[one] is None and now >= cache.next_lease_at:
                wants[one] = False
                leased = refill_and_take(level, now - filled_at, rate=rate, burst=cache.burst, most=cache.portion)
                level, filled_at = leased.left, now
                coming[one] = now + roundtrip, leased
    return used, uses


def busiest(uses, window):
    """Most that was used within `window` seconds."""
    most = within = first = 0
    for at, taken in uses:
        within += taken
        while uses[first][0] < at - window:
            within -= uses[first][1]
            first += 1
        most = max(most, within)
    return most


PROCESS_GROUPS = [
    (2000.0, [None]),
    (2000.0, [None, None]),
    (2000.0, [None] * 20),
    (2000.0, [150.0] * 20),  # each too slow to use a portion sized for the whole rate
    (2000.0, [1100.0] * 2),
    (2000.0, [3000.0, 100.0, 100.0]),
    (2000.0, [1300.0] * 2),
    (2000.0, [200.0] * 20),
    (100.0, [20.0] * 10),
    (80.0, [10.0] * 10),
    (20.0, [None] * 3),
    (5.0, [None] * 2),
    (1.0, [None] * 5),
]


@pytest.mark.parametrize(
    ("rate", "speeds"),
    PROCESS_GROUPS,
    ids=[f"{rate:g}/s, {len(s)} processes at {s[0] or 'full speed'}" for rate, s in PROCESS_GROUPS],
)
def test_processes_that_share_a_rate_use_nearly_all_of_it_and_never_more(rate, speeds):
    random.seed(1)
    seconds = max(5.0, 20 / rate)

    used, uses = shared(rate, speeds, seconds=seconds)

    cache = TokenCache(rate)
    assert 0.95 * rate * seconds <= sum(used)
    # The tokens that were cached when a window began, and the burst of the bucket, come on top of the rate.
    for window in (0.1, 1.0, seconds):
        assert busiest(uses, window) <= rate * (window + cache.lifetime) + cache.burst
