"""The health checks as URLs: `path("health/inbox/", include("inbox.health.urls"))`."""

from django.urls import path

from exactly_once.cli.health import live_view, ready_view
from inbox.health.checks import service_checks

app_name = "inbox_health"
urlpatterns = [
    path("live/", live_view(), name="live"),
    path("ready/", ready_view(service_checks), name="ready"),
]
