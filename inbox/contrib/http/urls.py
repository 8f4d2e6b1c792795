"""The HTTP API as URLs: `path("api/inbox/", include("inbox.contrib.http.urls"))`."""

from inbox.contrib.http.endpoints import api

app_name = api.urls_namespace
urlpatterns = api.patterns
