"""The HTTP APIs as a service has them."""

from django.urls import include, path

urlpatterns = [path("api/outbox/", include("outbox.http.urls")), path("api/inbox/", include("inbox.http.urls"))]
