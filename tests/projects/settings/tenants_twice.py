"""A schema for each tenant (django-tenants), with the apps in both"""

from tests.projects.settings.tenants import *

TENANT_APPS = INSTALLED_APPS[2:]

refused = "exactly_once.E005"
