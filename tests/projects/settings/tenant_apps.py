"""A schema for each tenant (django-tenants), with the apps in TENANT_APPS"""

from tests.projects.settings.tenants import *

TENANT_APPS = INSTALLED_APPS[2:]
SHARED_APPS = SHARED_APPS[:2]

refused = "exactly_once.E005"
