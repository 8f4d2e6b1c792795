"""The lease store that the settings name."""

from datetime import timedelta
from typing import Any

from django.utils.module_loading import import_string

from inbox.conf import IN_THE_DATABASE, InboxOptions
from inbox.leases.database import DatabaseLeases
from inbox.leases.stores import LeaseStore

# Imported by name: its library is optional.
_REDIS = "inbox.redis_leases.store.RedisLeases"
_opened: dict[tuple[str, str, timedelta, timedelta], LeaseStore] = {}


def lease_store(options: InboxOptions) -> LeaseStore:
    """The lease store, one for all threads of this process."""
    key = (options.LEASE_STORE, options.group, options.RETENTION, options.DUPLICATE_TIMEOUT)
    if key not in _opened:
        kind: Any = DatabaseLeases if options.LEASE_STORE == IN_THE_DATABASE else import_string(_REDIS)
        _opened.setdefault(key, kind(options))
    return _opened[key]
