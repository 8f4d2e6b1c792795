from tests.projects.split.base import *  # noqa: F403
from tests.projects.split.base import INBOX, OUTBOX

DEBUG = True
OUTBOX["LISTEN_ALIAS"] = None
INBOX |= {"CONCURRENCY": 2}
