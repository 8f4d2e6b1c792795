"""The alert rules and dashboards that are shipped, with a real Prometheus that scrapes a real relay."""

import json
import re
from pathlib import Path

import pytest
import yaml

import inbox.monitoring
import outbox.monitoring
from exactly_once import metrics
from outbox.states import State
from tests.support import ROOT
from tests.support.commands import ran
from tests.support.relaying import published, set_columns
from tests.support.servers import PrometheusServer, binaries
from tests.support.servers.private import free_port
from tests.support.waiting import wait_until

FOLDERS = [Path(package.__file__).parent for package in (outbox.monitoring, inbox.monitoring)]
APPS = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)


def exported():
    """The names of all series that the code exports."""
    suffixes = {"histogram": ("_bucket", "_count", "_sum")}
    return {name + suffix for name, found in metrics.instruments.items() for suffix in suffixes.get(found.kind, ("",))}


def series(text):
    return set(re.findall(r"\b(?:outbox|inbox|exactly_once)_[a-z_]+", text))


def promtool(*arguments):
    done = ran(binaries.promtool(), *arguments)
    assert done.returncode == 0, done.stdout


def scaling_queries():
    written = yaml.safe_load_all((ROOT / "docs" / "examples" / "kubernetes" / "scale.yaml").read_text())
    return [
        pytest.param(trigger["metadata"]["query"], id=scaled["metadata"]["name"])
        for scaled in written
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]


@pytest.mark.parametrize("query", scaling_queries())
def test_query_of_the_kubernetes_example_counts_a_backlog_once_and_only_while_a_process_works(query, tmp_path):
    backlog, processes = re.findall(r"max\((\w+\{[^}]+)\}\)", query)

    def given(working, expected):
        series = {(backlog, "a"): 45_000, (backlog, "b"): 45_000, (processes, "a"): working, (processes, "b"): working}
        return {
            "interval": "1m",
            "input_series": [
                {"series": f'{name}, instance="{instance}"}}', "values": str(value)}
                for (name, instance), value in series.items()
            ],
            "promql_expr_test": [{"expr": query, "eval_time": "0m", "exp_samples": expected}],
        }

    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"tests": [given(2, [{"labels": "{}", "value": 45_000}]), given(0, [])]}))

    promtool("test", "rules", file)


@APPS
def test_rules_and_dashboard_use_only_series_that_exist(folder):
    expressions = re.findall(r"^ +expr: (.+)$", (folder / "alerts.yml").read_text(), re.MULTILINE)
    dashboard = json.loads((folder / "dashboard.json").read_text())
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]

    assert series(" ".join(expressions)) <= exported()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@APPS
def test_every_metric_of_the_app_is_on_its_dashboard_or_in_a_rule(folder):
    app = folder.parent.name
    text = (folder / "alerts.yml").read_text() + (folder / "dashboard.json").read_text()
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in series(text)}

    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported() if name.startswith(f"{app}_")} <= shown


@pytest.mark.django_db(transaction=True)
def test_prometheus_scrapes_a_relay_and_an_alert_fires_and_ends(a_process):
    port = free_port()
    options = ["--metrics-port", str(port), "--metrics-address", "127.0.0.1"]
    message = published(topic="nowhere", payload={})
    set_columns(message, state=State.DEAD)
    rules = [folder / "alerts.yml" for folder in FOLDERS]
    with a_process("outbox_relay", *options) as relay, PrometheusServer([f"127.0.0.1:{port}"], rules) as prometheus:
        relay.until(lambda: prometheus.query('outbox_relays{state="working"} == 1'))
        wait_until(lambda: "OutboxDeadMessages" in prometheus.firing(), within=60)
        set_columns(message, state=State.CANCELLED)
        wait_until(lambda: "OutboxDeadMessages" not in prometheus.firing(), within=60)

        dashboard = json.loads((FOLDERS[0] / "dashboard.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                prometheus.query(target["expr"].replace("$database", ".*").replace("$__rate_interval", "10s"))
