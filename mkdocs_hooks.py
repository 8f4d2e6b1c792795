"""Hooks of mkdocs: the addresses of the site and of the repository are those of `[project.urls]` in pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    if site := project["urls"].get("Documentation"):
        config.site_url = site.rstrip("/") + "/"
    if repository := project["urls"].get("Source"):
        config.repo_url = repository
        config.repo_name = project["name"]
    return config
