"""A lower bound for what a test collects: an assertion about each of nothing would pass."""


def at_least(number, collected):
    """What is collected, as a list; an error if it is less than this."""
    collected = list(collected)
    assert len(collected) >= number, f"{len(collected)} of at least {number} were found: {collected}"
    return collected
