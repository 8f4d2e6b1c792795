from datetime import timedelta

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import OUTBOX

LANGUAGE_CODE = "de"
OUTBOX = {**OUTBOX, "KEEP_HISTORY": timedelta(days=3)}
INBOX = {"KEEP_HISTORY": OUTBOX["KEEP_HISTORY"]}
