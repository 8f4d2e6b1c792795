"""Trace the ways that a delivery goes through the inbox; print the figures of each as JSON."""

from __future__ import annotations

import json

import django


def main() -> None:
    from benchmarks.lab.paths import figures, paths  # noqa: PLC0415 - needs Django

    print(json.dumps({way: figures(trace) for way, trace in paths().items()}))


if __name__ == "__main__":
    django.setup()
    main()
