"""gunicorn with workers of gevent: requests that publish, the pages and the probes"""

from tests.projects.settings.plain import *

server = ("gunicorn", "--bind=127.0.0.1:0", "--workers=2", "--worker-class=gevent", "django.core.wsgi:get_wsgi_application()")
