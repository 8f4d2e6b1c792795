"""The settings of processes that are killed, with a topic that is sent to webhook endpoints on loopback addresses."""

from tests.support.crash.settings import *  # noqa: F403
from tests.support.crash.settings import INBOX as _INBOX
from tests.support.crash.settings import INSTALLED_APPS as _INSTALLED_APPS

INSTALLED_APPS = [*_INSTALLED_APPS, "tests.support.apps.hooked"]
INBOX = {**_INBOX, "WEBHOOK_NETWORKS": ["127.0.0.0/8"]}
