from django.apps import apps
from django.contrib import admin
from django.http import HttpResponse
from django.urls import include, path

from tests.projects.cycle import write


def write_in_a_request(request):
    write("")
    return HttpResponse()


urlpatterns = [
    path("admin/", admin.site.urls),
    path("health/", include("exactly_once.console.health")),
    path("write/", write_in_a_request),
]
if apps.is_installed("grappelli"):
    urlpatterns.insert(0, path("grappelli/", include("grappelli.urls")))
