from django.apps import apps
from django.contrib import admin
from django.urls import include, path

urlpatterns = [path("admin/", admin.site.urls), path("health/", include("exactly_once.health"))]
if apps.is_installed("grappelli"):
    urlpatterns.insert(0, path("grappelli/", include("grappelli.urls")))
