"""The settings of processes that are killed, with the HTTP APIs and a subscription."""

from tests.support.crash.settings import *  # noqa: F403
from tests.support.crash.settings import INSTALLED_APPS as _INSTALLED_APPS
from tests.support.crash.settings import OUTBOX as _OUTBOX
from tests.support.http_api import HTTP

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.subscribed"]
ROOT_URLCONF = "tests.support.http_urls"
OUTBOX = {**_OUTBOX, "HTTP": HTTP}
