"""The example on the page of signals counts what the inbox reports."""

import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from inbox.signals import message_dead, message_handled
from tests.support import ROOT


@pytest.fixture
def counts(monkeypatch):
    """What the documented receivers count while they are connected: by metric and label."""
    counted = Counter()

    class Metric:
        def __init__(self, name, documentation, labelnames):
            self._name = name

        def labels(self, label):
            return SimpleNamespace(inc=lambda: counted.update([(self._name, label)]))

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Counter=Metric))
    page = (ROOT / "docs" / "reference" / "signals.md").read_text()
    [code] = re.findall(r'^```python title="orders/metrics.py.*?\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "orders/metrics.py", "exec"), names)
    yield counted
    message_handled.disconnect(names["count_handled"])
    message_dead.disconnect(names["count_dead"])


def test_documented_receivers_count_handled_and_dead_messages_by_handler(counts):
    for handler in ("a", "a", "b"):
        message_handled.send_robust(None, handler=handler, message_id="m-1")
    message_dead.send_robust(None, handler="b", message_id="m-1", error="no stock")

    assert counts == {
        ("orders_messages_handled", "a"): 2,
        ("orders_messages_handled", "b"): 1,
        ("orders_messages_dead", "b"): 1,
    }
