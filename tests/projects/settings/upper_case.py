"""Labels of apps with capital letters"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import INSTALLED_APPS

_LABELLED = {"outbox": "tests.projects.labels.EventBus", "inbox": "tests.projects.labels.EventInbox"}
INSTALLED_APPS = [_LABELLED.get(app, app) for app in INSTALLED_APPS]

refused = "exactly_once.E004"
