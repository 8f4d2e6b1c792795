"""The tenants of a project with django-tenants."""
