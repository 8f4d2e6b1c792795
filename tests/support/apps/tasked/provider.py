"""A system outside of the database, in memory: it does what it is asked once for each idempotency key."""

from collections import Counter


class Provider:
    """
    Attributes:
        asked: how often, by key.
        is_down: it refuses everything.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.is_down = False

    def charge(self, key: str) -> str:
        self.asked[key] += 1
        if self.is_down:
            raise ConnectionError("the provider is down")
        return f"charged {key}"


provider = Provider()
