"""Labels of apps with capital letters"""

from tests.projects.settings.plain import *

_LABELLED = {"outbox": "tests.projects.labels.EventBus", "inbox": "tests.projects.labels.EventInbox"}
INSTALLED_APPS = [_LABELLED.get(app, app) for app in INSTALLED_APPS]

refused = "exactly_once.E004"
