"""What the HTTP APIs of both apps share: tokens, limits, and errors as problem details.

Nothing but `outbox.contrib.http` and `inbox.contrib.http` imports this package. It needs Django Ninja, an extra.
"""

from importlib.util import find_spec

from django.core.exceptions import ImproperlyConfigured

if find_spec("ninja") is None:
    raise ImproperlyConfigured('The HTTP API needs Django Ninja: pip install "django-exactly-once[http]".')
