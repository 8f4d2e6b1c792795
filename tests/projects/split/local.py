from tests.projects.split.base import *

DEBUG = True
OUTBOX["LISTEN_ALIAS"] = None
INBOX |= {"CONCURRENCY": 2}
