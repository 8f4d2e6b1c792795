"""The table of a benchmark shows the last kept value of each figure, and `keep` writes them."""

from benchmarks.lab import last
from benchmarks.lab.record import Record
from benchmarks.lab.report import WIDTH, table


def a_record(*rates):
    record = Record(name="publish", question="How fast?")
    for rate in rates:
        record.add("publish()", rate, "round trips")
        record.add("raw INSERT", 1000.0, "tx/s")
    record.compare("publish()", "raw INSERT", reach=">= 0.90", name="publish / raw")
    return record


def line_of(name, lines):
    return next(line for line in lines if line.startswith(name)).removeprefix(name).split()


def test_kept_medians_are_shown_beside_the_next_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(last, "FILE", tmp_path / "last.json")
    last.FILE.write_text('{"relay": {}, "publish": {"renamed": {}}}')
    last.keep(a_record(700.0, 800.0, 1_234_567.0))
    record = a_record(900.0)
    record.add("new", 1.0, "ms")

    lines = table(record, last.last_figures("publish")).splitlines()

    assert line_of("publish() ", lines) == ["900", "900", "900", "800", "1", "round", "trips"]
    assert line_of("publish / raw ", lines) == ["0.90", "0.90", "0.90", "0.80", "1", ">=", "0.90"]
    assert line_of("new ", lines) == ["1.00", "1.00", "1.00", "-", "1", "ms"]
    assert max(map(len, lines)) <= WIDTH
    assert list(last.last_figures("publish")) == ["publish()", "raw INSERT", "publish / raw"]
    assert last.last_figures("relay") == {}
