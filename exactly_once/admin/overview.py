"""The overview in the admin: one page for all installed apps, refreshed by a script; see `overview`."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.forms import Media
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _

from exactly_once.admin.acting import ReadOnlyAdmin
from exactly_once.admin.sections import DAY, HOUR, Half, charts, halves, shown, stages

_PAGE = "exactly_once/overview.html"
_LATENCY = "exactly_once/latency.html"
_FIGURES = "exactly_once/overview_figures.html"
_RANGES = {"hour": HOUR, "day": DAY}


class OverviewAdmin(ReadOnlyAdmin):
    """Shows a half for each installed app that the user may view."""

    actions = None

    @property
    def media(self) -> Media:
        return Media(
            css={"all": ["exactly_once/admin.css", "exactly_once/uplot/uPlot.min.css", "exactly_once/overview.css"]},
            js=["exactly_once/uplot/uPlot.iife.min.js", "exactly_once/overview.js"],
        )

    def get_urls(self) -> list[URLPattern]:
        name, view = f"{self.opts.app_label}_overview", self.admin_site.admin_view
        return [
            path("figures/", view(self.figures_view), name=f"{name}_figures"),
            path("latency/", view(self.latency_view), name=f"{name}_latency"),
            *super().get_urls(),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        self._require_permission(request)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Overview"),
            "opts": self.opts,
            "media": self.media,
            "halves": [(half, self._figures(half, request)) for half in halves(request)],
            "figures_url": self._url("figures"),
            "latency_url": self._url("latency"),
            **(extra_context or {}),
        }
        return TemplateResponse(request, _PAGE, context)

    def latency_view(self, request: HttpRequest) -> HttpResponse:
        """The stages of the messages of each topic."""
        self._require_permission(request)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Latency by topic"),
            "opts": self.opts,
            "media": self.media,
            "stages": stages(halves(request), self.using),
            "overview_url": self._url("changelist"),
        }
        return TemplateResponse(request, _LATENCY, context)

    def _url(self, page: str) -> str:
        return reverse(f"{self.admin_site.name}:{self.opts.app_label}_overview_{page}")

    def figures_view(self, request: HttpRequest) -> HttpResponse:
        """The figures for the script: as HTML, and with `charts` the series of the last hour or day."""
        self._require_permission(request)
        duration = _RANGES.get(request.GET.get("charts", ""))
        found: dict[str, Any] = {}
        for half in halves(request):
            found[half.app] = {"figures": self._figures(half, request)}
            if duration is not None:
                found[half.app]["charts"] = charts(half, self.using, duration)
        response = JsonResponse(found)
        response["Cache-Control"] = "no-store"
        return response

    def _require_permission(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def _figures(self, half: Half, request: HttpRequest) -> str:
        context = shown(half, self.using, self.admin_site, request)
        return mark_safe(render_to_string(_FIGURES, context, request))  # noqa: S308 - rendered by a template, which escapes
