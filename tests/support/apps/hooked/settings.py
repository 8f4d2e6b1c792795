"""The settings of processes that are killed, with a topic that is sent to webhook endpoints on loopback addresses."""

from tests.support.crash.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.hooked"]
INBOX = {**INBOX, "WEBHOOK_NETWORKS": ["127.0.0.0/8"]}
