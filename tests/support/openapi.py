"""Write the OpenAPI documents of the HTTP APIs into docs/reference: `python -m tests.support.openapi`."""

import os
from importlib import import_module

import django

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.support.http_api import documents, rendered

    for module, place in documents().items():
        place.write_text(rendered(import_module(module).api))
