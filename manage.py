#!/usr/bin/env python
"""Django's command line, for the demo shop unless DJANGO_SETTINGS_MODULE says otherwise."""

import os
import sys


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_shop.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as error:
        words = "Django is not installed for this Python. `make demo` installs it in .venv: run `.venv/bin/python manage.py`."
        raise SystemExit(words) from error
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
