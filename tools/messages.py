"""Extract the texts of both apps for translation, and compile their catalogs: `make messages`.

makemessages of Django serves one app. The result has neither dates nor line numbers: it changes when a text changes,
and only then. It needs GNU gettext.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import ROOT
from tests.support.servers import binaries

LANGUAGES = ("de",)
APPS = ("exactly_once", "outbox", "inbox")
KEYWORDS = ("_", "gettext", "gettext_lazy", "gettext_noop", "ngettext:1,2", "ngettext_lazy:1,2")
HEADER = """msgid ""
msgstr ""
"Language: {language}\\n"
"MIME-Version: 1.0\\n"
"Content-Type: text/plain; charset=UTF-8\\n"
"Content-Transfer-Encoding: 8bit\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

"""


def catalog(app: str, language: str, root: Path = ROOT) -> Path:
    """The catalog of an app, without its suffix."""
    return root / app / "locale" / language / "LC_MESSAGES" / "django"


def extracted(app: str, directory: Path) -> Path:
    """A template with all texts of an app, in this directory."""
    # Django reads its settings for the syntax of templates only.
    from django.utils.translation import templatize  # noqa: PLC0415

    files = []
    for path in _sources(app):
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".html":
            copy = copy.with_suffix(".html.py")
            text = templatize(text, origin=str(path))
        copy.write_text(text, encoding="utf-8")
        files.append(str(copy))
    template = directory / f"{app}.pot"
    _run(
        "xgettext",
        *("--language=Python", "--from-code=UTF-8", "--no-location", "--no-wrap", "--sort-output"),
        *(f"--keyword={keyword}" for keyword in KEYWORDS),
        f"--output={template}",
        *files,
    )
    # The header of xgettext has the date.
    _, _, body = template.read_text(encoding="utf-8").partition("\n\n")
    # Newer releases of xgettext flag texts with `{}`, too, and the catalog is not to depend on the release.
    entries = [entry.replace("#, python-brace-format\n", "") if "{}" in entry else entry for entry in body.split("\n\n")]
    template.write_text(HEADER.format(language="") + "\n\n".join(entries), encoding="utf-8")
    return template


def update(app: str, language: str, directory: Path, root: Path = ROOT) -> None:
    """Bring the catalog of an app up to date, and compile it: new texts are empty, removed ones are left out."""
    template, target = extracted(app, directory), catalog(app, language, root)
    target.parent.mkdir(parents=True, exist_ok=True)
    source, merged = target.with_suffix(".po"), directory / f"{app}-{language}.po"
    if not source.exists():
        source.write_text(HEADER.format(language=language), encoding="utf-8")
    options = ["--no-fuzzy-matching", "--no-wrap", "--sort-output", "--quiet"]
    _run("msgmerge", *options, f"--output-file={merged}", str(source), str(template))
    _run("msgattrib", "--no-obsolete", "--no-wrap", "--sort-output", f"--output-file={source}", str(merged))
    _run("msgfmt", "--check-format", "--no-hash", f"--output-file={target.with_suffix('.mo')}", str(source))


def _sources(app: str) -> Iterator[Path]:
    for path in sorted((ROOT / app).rglob("*")):
        if path.suffix in {".py", ".html"} and "migrations" not in path.parts:
            yield path


def _run(tool: str, *arguments: str) -> None:
    command = [str(binaries.gettext() / tool), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def main(languages: Sequence[str] = LANGUAGES) -> None:
    from django.conf import settings  # noqa: PLC0415

    if not settings.configured:
        settings.configure()
    for app in APPS:
        for language in languages:
            directory = Path(tempfile.mkdtemp())
            try:
                update(app, language, directory)
            finally:
                shutil.rmtree(directory)


if __name__ == "__main__":
    main(sys.argv[1:] or LANGUAGES)
