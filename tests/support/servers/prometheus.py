"""A private Prometheus that scrapes the targets of a test, every second."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tests.support.servers import binaries
from tests.support.servers.private import LOOPBACK, PrivateServer


class PrometheusServer(PrivateServer):
    name: ClassVar[str] = "Prometheus"

    def __init__(self, targets: Sequence[str], rules: Sequence[Path]) -> None:
        super().__init__()
        self._targets = targets
        self._rules = rules

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        result: list[dict[str, Any]] = self._asked("query?" + urllib.parse.urlencode({"query": expression}))["result"]
        return result

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = self._asked("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def _asked(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}", timeout=10) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def _prepare(self) -> None:
        self._binary = binaries.prometheus()
        # JSON is YAML.
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules) for rules in self._rules],
            "scrape_configs": [{"job_name": "exactly-once", "static_configs": [{"targets": list(self._targets)}]}],
        }
        (self.directory / "prometheus.yml").write_text(json.dumps(configuration))

    def _launch(self) -> subprocess.Popen[bytes]:
        options = {
            "config.file": str(self.directory / "prometheus.yml"),
            "storage.tsdb.path": str(self.directory / "data"),
            "web.listen-address": f"{LOOPBACK}:{self.port}",
        }
        return self._spawn([str(self._binary), *(f"--{name}={value}" for name, value in options.items())])

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
