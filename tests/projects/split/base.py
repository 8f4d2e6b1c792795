from datetime import timedelta

from tests.projects.settings.plain import *

LANGUAGE_CODE = "de"
OUTBOX = {**OUTBOX, "KEEP_HISTORY": timedelta(days=3)}
INBOX = {"KEEP_HISTORY": OUTBOX["KEEP_HISTORY"]}
