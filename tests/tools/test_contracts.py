"""The table of what the public harness says of task queues counts a declared gap as one."""

import json

from benchmarks.contracts.__main__ import Answer

HISTORIES = ["baseline", "matches baseline", "diverged (unpinned)", "fault not reached"]


def profile(state, *, because=None, verified=False, **cases):
    return {
        "title": "",
        "assessment": {"state": state, "because": because},
        "families": {},
        "cases": cases,
        "verified": verified,
    }


def test_declared_gap_is_not_held_and_a_history_that_diverged_in_it_is_counted(tmp_path):
    profiles = {
        "A": profile("known gap", because="no sweep", handoff={"failures": [{"message": "HistoriesDiverged: two effects"}]}),
        "B": profile("claimed", fence={"failures": [{"message": "stale token accepted"}]}),
        "D": profile("claimed", verified=True),
        "F": profile("not applicable"),
        "J": profile("declined"),
    }
    (tmp_path / "profiles.json").write_text(json.dumps({"Suite": {"profiles": profiles}}))
    histories = json.dumps([{"status": status} for status in HISTORIES]).replace('"', "&quot;")
    case = f'<testcase><properties><property name="obligation_histories" value="{histories}"/></properties></testcase>'
    (tmp_path / "cases.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")

    answer = Answer(tmp_path)

    assert answer.row("queue") == "| queue | D | A B | F | J | 1 of 2 |"
    assert list(answer.words) == ["known gap A: no sweep", "HistoriesDiverged: two effects", "stale token accepted"]
