import uuid
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS

from outbox import store
from outbox.kernel.console import Progress, refuse_unknown
from outbox.kernel.databases import require_table
from outbox.models import OutboxMessage, State


class Command(BaseCommand):
    help = "Have the checkers of stuck messages asked again, at once and anew as often."
