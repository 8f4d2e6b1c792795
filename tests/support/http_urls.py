"""The HTTP APIs as a service has them."""

from django.urls import include, path

urlpatterns = [path("api/outbox/", include("outbox.contrib.http.urls")), path("api/inbox/", include("inbox.contrib.http.urls"))]
