"""The HTTP API as URLs: `path("api/outbox/", include("outbox.http.urls"))`."""

from outbox.http.api import api

app_name = api.urls_namespace
urlpatterns = api.patterns
