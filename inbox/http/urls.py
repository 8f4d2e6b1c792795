"""The HTTP API as URLs: `path("api/inbox/", include("inbox.http.urls"))`."""

from inbox.http.api import api

app_name = api.urls_namespace
urlpatterns = api.patterns
