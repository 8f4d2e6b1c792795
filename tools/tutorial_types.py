"""Check the types of the tutorial's project, with typed payloads, with mypy and pyright: `python -m tools.tutorial_types`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.pages import DOCS, titled_files
from tests.support.projects import environment_in

SETTINGS = """\
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["exactly_once", "outbox", "inbox", "orders"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
"""
CONFIGURATION = """\
[tool.mypy]
plugins = ["mypy_django_plugin.main"]
check_untyped_defs = true

[tool.django-stubs]
django_settings_module = "shop.settings"
"""
CHECKERS = (("mypy", "--no-incremental", "orders"), ("pyright", "--pythonpath", sys.executable, "orders"))


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        written = titled_files(DOCS / "how-to" / "typed-payloads.md", titled_files(DOCS / "getting-started.md"))
        files = {
            "pyproject.toml": CONFIGURATION,
            "shop/__init__.py": "",
            "shop/settings.py": SETTINGS,
            "orders/__init__.py": "",
            **{name: text for name, text in written.items() if name.startswith("orders/")},
        }
        for path, text in files.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
        environment = environment_in(directory, "shop.settings")
        ended = [
            subprocess.run([sys.executable, "-m", *checker], cwd=directory, env=environment, check=False).returncode
            for checker in CHECKERS
        ]
    return max(ended)


if __name__ == "__main__":
    sys.exit(main())
