"""A schema for each tenant (django-tenants), with the apps in SHARED_APPS and in TENANT_APPS"""

from tests.projects.settings.tenants import *  # noqa: F403
from tests.projects.settings.tenants import SHARED_APPS as _SHARED_APPS
from tests.projects.settings.tenants import TENANT_APPS

SHARED_APPS = [*_SHARED_APPS, *(app for app in TENANT_APPS if app not in _SHARED_APPS)]
INSTALLED_APPS = SHARED_APPS
