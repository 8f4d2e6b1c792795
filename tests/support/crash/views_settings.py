"""The settings of a web server that is killed, with idempotent views."""

from tests.support.crash.settings import *

ROOT_URLCONF = "tests.support.idempotent_views"
