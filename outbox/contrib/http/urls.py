"""The HTTP API as URLs: `path("api/outbox/", include("outbox.contrib.http.urls"))`."""

from outbox.contrib.http.endpoints import api

app_name = api.urls_namespace
urlpatterns = api.patterns
