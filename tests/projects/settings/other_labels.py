"""Our apps under other labels than `outbox` and `inbox`"""

from tests.projects.settings.plain import *

_LABELLED = {"outbox": "tests.projects.labels.MessageOutbox", "inbox": "tests.projects.labels.MessageInbox"}
INSTALLED_APPS = [_LABELLED.get(app, app) for app in INSTALLED_APPS]
