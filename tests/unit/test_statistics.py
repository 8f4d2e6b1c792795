"""Counting in memory, histograms and their percentiles."""

import random
from collections import Counter

import pytest

from exactly_once.telemetry.statistics import BOUNDS, MOST_SUBJECTS, OTHER, Tally, bucket_of, percentile, total


def histogram(seconds):
    return Counter(map(bucket_of, seconds))


def test_percentile_is_off_by_at_most_a_fifth():
    source = random.Random(17)
    durations = sorted(source.lognormvariate(-3, 2) for _ in range(5000))
    durations = [seconds for seconds in durations if BOUNDS[0] < seconds < BOUNDS[-1]]

    for share in (0.5, 0.95, 0.99):
        exact = durations[int(share * len(durations))]
        assert percentile(histogram(durations), share) == pytest.approx(exact, rel=0.21)


def test_percentile_of_no_durations_is_unknown():
    assert percentile({}, 0.5) is None


def test_durations_beyond_the_bounds_and_negative_ones_have_a_bucket():
    assert bucket_of(-5.0) == 0
    assert bucket_of(1e9) == len(BOUNDS)
    assert percentile({0: 1}, 0.99) < BOUNDS[0]
    assert percentile({len(BOUNDS): 1}, 0.5) == BOUNDS[-1]


def test_histograms_of_several_processes_add_up():
    one, other = Tally(), Tally()
    one.time("shop.a", "to_broker", [0.01, 0.02])
    other.time("shop.a", "to_broker", [0.01])
    other.count("shop.b", "published", 3)

    added = total([*one.take().values(), *other.take().values()])

    assert added.times["to_broker"] == histogram([0.01, 0.02, 0.01])
    assert added.counts == {"published": 3}


def test_subjects_beyond_the_limit_are_counted_as_other():
    tally = Tally()
    for number in range(MOST_SUBJECTS + 7):
        tally.count(f"topic-{number}", "published")
    tally.count("topic-0", "published")

    taken = tally.take()

    assert len(taken) == MOST_SUBJECTS + 1
    assert taken[OTHER].counts == {"published": 7}
    assert taken["topic-0"].counts == {"published": 2}
    assert tally.take() == {}


def test_counts_that_are_put_back_are_taken_again():
    tally = Tally()
    tally.count("shop.a", "published")
    taken = tally.take()
    tally.count("shop.a", "published")

    tally.put_back(taken)

    assert tally.take()["shop.a"].counts == {"published": 2}
