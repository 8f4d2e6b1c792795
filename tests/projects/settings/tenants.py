"""A schema for each tenant (django-tenants), with the apps in TENANT_APPS"""

from tests.projects.settings.plain import *  # noqa: F403
from tests.projects.settings.plain import DATABASES, INSTALLED_APPS

SHARED_APPS = ["django_tenants", "tests.projects.customers", "django.contrib.contenttypes"]
TENANT_APPS = INSTALLED_APPS
INSTALLED_APPS = [*SHARED_APPS, *(app for app in TENANT_APPS if app not in SHARED_APPS)]
DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
TENANT_MODEL = "customers.Customer"
TENANT_DOMAIN_MODEL = "customers.Domain"

tenants = ("blue", "red")
