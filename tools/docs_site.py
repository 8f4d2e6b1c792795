"""The hooks of MkDocs.

The addresses of the site and of the repository are those of `[project.urls]` in pyproject.toml.

On a page that is a file of the top level, such as `docs/changelog.md`, links work as they do in the file: one to a page in
`docs`, or to another of these files, leads to its page. Any other file is not on the site, and only the text of a link to it
remains.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
_INCLUDE = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)
_CODE_OR_LINK = re.compile(r"`[^`]*`|\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_DEFINITION = re.compile(r"^(\[[^\]]+\]: )docs/", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    if site := project["urls"].get("Documentation"):
        config.site_url = site.rstrip("/") + "/"
    if repository := project["urls"].get("Source"):
        config.repo_url = repository
        config.repo_name = project["name"]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Include the file before the snippets do, with its links."""
    return _INCLUDE.sub(lambda found: with_links_of_the_site((ROOT / found[1]).read_text(encoding="utf-8")), markdown)


def with_links_of_the_site(text: str) -> str:
    return _DEFINITION.sub(r"\1", _CODE_OR_LINK.sub(_on_the_site, text))


def _on_the_site(found: re.Match[str]) -> str:
    text, target, anchor = found.groups(default="")
    page = target.removeprefix("docs/") if target.startswith("docs/") else PAGES.get(target)
    if not target:  # code
        return found[0]
    return f"[{text}]({page}{anchor})" if page else text
