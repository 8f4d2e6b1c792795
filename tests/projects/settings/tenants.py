"""A schema for each tenant (django-tenants), with the apps in SHARED_APPS"""

from tests.projects.settings.plain import *

SHARED_APPS = ["django_tenants", "tests.projects.customers", *INSTALLED_APPS[:-1]]
TENANT_APPS = INSTALLED_APPS[-1:]
INSTALLED_APPS = [*SHARED_APPS, *TENANT_APPS]
DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
TENANT_MODEL = "customers.Customer"
TENANT_DOMAIN_MODEL = "customers.Domain"
OUTBOX = {**OUTBOX, "PUBLISH_HOOKS": ["tests.projects.customers.schemas.tenant_header"]}
INBOX = {**INBOX, "AROUND": ["tests.projects.customers.schemas.tenant_of"]}

broker = True
tenants = ("blue", "red")
