"""The settings of processes that are killed, with the HTTP APIs and a subscription."""

from tests.support.crash.settings import *
from tests.support.http_api import HTTP

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.subscribed"]
ROOT_URLCONF = "tests.support.http_urls"
OUTBOX = {**OUTBOX, "HTTP": HTTP}
