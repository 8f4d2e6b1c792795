"""uvicorn (ASGI): requests that publish, the pages and the probes"""

from tests.projects.settings.plain import *

server = ("uvicorn", "--port=0", "--factory", "django.core.asgi:get_asgi_application")
