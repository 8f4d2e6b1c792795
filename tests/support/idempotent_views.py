"""Idempotent views of every kind, as a project has them. Each leaves one Effect, and ends as the test says."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

from django.db import DatabaseError, IntegrityError, connection, transaction
from django.http import Http404, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.exceptions import NotFound
from rest_framework.parsers import BaseParser, DataAndFiles, FileUploadParser, JSONParser, MultiPartParser
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.response import Response
from rest_framework.views import APIView

from exactly_once.contrib.views import by_token, idempotent_view
from exactly_once.contrib.views.models import IdempotentRequest
from exactly_once.process.clock import utcnow
from tests.support.apps.effects.models import Effect, Unique

plan = SimpleNamespace(how="ok", begun=threading.Event(), go_on=threading.Event())
"""How the views end, and where they wait if they end in "wait"."""


def by_client(request):
    return request.headers.get("Client", "")


def effect(using=None):
    made = Effect(name="paid", detail=plan.how)
    made.save(using=using)
    if plan.how == "wait":
        plan.begun.set()
        assert plan.go_on.wait(60)
    return made


def end(request):
    """What the plan says; else an answer with headers and a cookie."""
    made = effect()
    if plan.how == "404 raised":
        raise Http404
    if plan.how == "error":
        raise ZeroDivisionError
    if plan.how in {"402", "409", "500", "503"}:
        return HttpResponse(plan.how, status=int(plan.how))
    if plan.how == "204":
        response = HttpResponse(status=204)
        del response["Content-Type"]
        return response
    if plan.how == "stream":
        return StreamingHttpResponse(["a", "b"])
    if plan.how == "template":
        response = TemplateResponse(request, engines["django"].from_string("first"))
        response.add_post_render_callback(lambda rendered: HttpResponse(rendered.content + b", then changed"))
        return response
    if plan.how == "slow":
        # As if it took longer than the answer is kept.
        IdempotentRequest.objects.update(expires_at=made_before())
    if plan.how == "large":
        return HttpResponse(b"x" * 5000)
    BREAKS.get(plan.how, lambda: None)()
    response = JsonResponse({"payment": made.pk}, status=201, headers={"Location": f"/payments/{made.pk}"})
    response["Set-Cookie"] = "session=secret"
    response.set_cookie("theme", "dark")
    return response


def made_before():
    return utcnow() - timedelta(seconds=1)


def swallow_in_atomic():
    with suppress(IntegrityError), transaction.atomic(savepoint=False):
        Unique.objects.create(name="twice")
        Unique.objects.create(name="twice")


def swallow_raw():
    with suppress(DatabaseError):
        connection.cursor().execute("SELECT * FROM there_is_no_such_table")


def close():
    connection.close()


BREAKS = {
    "swallows a database error": swallow_in_atomic,
    "swallows an error of a statement": swallow_raw,
    "asks for a rollback": lambda: transaction.set_rollback(True),
    "closes the connection": close,
    "commits": lambda: connection.cursor().execute("COMMIT"),
}
"""What a view does that keeps its transaction from committing. The last two need a transaction of their own."""

function = idempotent_view(scope=by_client, store_errors=[402], response_limit=4000)(end)


async def end_async(request):
    made = await Effect.objects.acreate(name="paid", detail=plan.how)
    if plan.how == "error":
        raise ZeroDivisionError
    return JsonResponse({"payment": made.pk}, status=409 if plan.how == "409" else 201)


def after_reading(view):
    """Other code has read a part of the body as a stream."""

    def reading(request):
        request.read(1)
        return view(request)

    return reading


@method_decorator(csrf_exempt, name="dispatch")
@method_decorator(idempotent_view(scope=by_client), name="dispatch")
class ClassView(View):
    def post(self, request):
        return end(request)

    def get(self, request):
        return end(request)


@method_decorator(csrf_exempt, name="dispatch")
@method_decorator(idempotent_view(scope=by_client), name="dispatch")
class AsyncClassView(View):
    async def post(self, request):
        return await end_async(request)


def end_rest(request):
    made = effect()
    if plan.how == "409":
        raise NotFound  # after an effect, without ATOMIC_REQUESTS
    if plan.how == "error":
        raise ZeroDivisionError
    if plan.how == "204":
        return Response(status=204)
    return Response({"payment": made.pk, "given": request.data}, status=201, headers={"Location": f"/payments/{made.pk}"})


@api_view(["POST"])
@authentication_classes([])
@permission_classes([])
@idempotent_view(scope=by_client)
def rest_function(request):
    return end_rest(request)


@method_decorator(idempotent_view(scope=by_client), name="put")
@method_decorator(idempotent_view(scope=by_client), name="post")
class RestView(APIView):
    authentication_classes = ()
    permission_classes = ()

    def post(self, request):
        return end_rest(request)

    put = post


class OwnFormParser(MultiPartParser):
    def parse(self, stream, *args, **kwargs):
        parsed = super().parse(stream, *args, **kwargs)
        return DataAndFiles({name: f"own {parsed.data[name]}" for name in parsed.data}, parsed.files)


class OwnParser(BaseParser):
    """Reads the stream, which JSONParser does not any more."""

    media_type = "text/own"

    def parse(self, stream, *args, **kwargs):
        return {"amount": stream.read().decode()}


class ReadsTheBody(BasePermission):
    def has_permission(self, request, view):
        return request.data is not None


class RestOfOwnForm(RestView):
    parser_classes = (OwnFormParser,)


class RestOfFile(RestView):
    parser_classes = (FileUploadParser,)
    permission_classes = (ReadsTheBody,)

    @method_decorator(idempotent_view(scope=by_client))
    def post(self, request):
        effect()
        return Response({"content": request.FILES["file"].read().decode()}, status=201)


class RestOfJson(RestView):
    parser_classes = (JSONParser,)


class RestOfOwnParser(RestView):
    parser_classes = (OwnParser,)
    permission_classes = (ReadsTheBody,)


@method_decorator(idempotent_view, name="dispatch")
class RestOutside(APIView):
    """In the wrong order."""

    def post(self, request):
        return end_rest(request)


@method_decorator(idempotent_view, name="post")
class RestOfUsers(APIView):
    permission_classes = (IsAuthenticated,)

    def post(self, request):
        return end_rest(request)


api = NinjaAPI(urls_namespace="idempotent", docs_url=None)


@api.post("/pay")
@decorate_view(idempotent_view(scope=by_client))
def ninja_function(request):
    made = effect()
    if plan.how == "409":
        raise HttpError(409, "no")
    if plan.how == "error":
        raise ZeroDivisionError
    return {"payment": made.pk}


@api.post("/apay")
@decorate_view(idempotent_view(scope=by_client))
async def ninja_async(request):
    made = await Effect.objects.acreate(name="paid", detail=plan.how)
    if plan.how == "409":
        raise HttpError(409, "no")
    if plan.how == "error":
        raise ZeroDivisionError
    return {"payment": made.pk}


@idempotent_view(scope=by_client, using="other")
def elsewhere(request):
    return JsonResponse({"payment": effect("other").pk})


KINDS = {
    "function": csrf_exempt(function),
    "async": csrf_exempt(idempotent_view(scope=by_client)(end_async)),
    "class": ClassView.as_view(),
    "async-class": AsyncClassView.as_view(),
    "rest": rest_function,
    "rest-class": RestView.as_view(),
}
urlpatterns = [
    *(path(f"{kind}/", view, name=kind) for kind, view in KINDS.items()),
    path("ninja/", api.urls),
    path("users/", idempotent_view(end)),
    path("rest-users/", RestOfUsers.as_view()),
    path("tokens/", csrf_exempt(idempotent_view(scope=by_token)(end))),
    path("optional/", csrf_exempt(idempotent_view(scope=by_client, required=False, expires_in=timedelta(hours=1))(end))),
    path("nested/", csrf_exempt(idempotent_view(scope=by_client)(function))),
    path("elsewhere/", csrf_exempt(elsewhere)),
    path("outside/", RestOutside.as_view()),
    path("rest-own-form/", RestOfOwnForm.as_view()),
    path("rest-file/", RestOfFile.as_view()),
    path("rest-json/", RestOfJson.as_view()),
    path("rest-own-parser/", RestOfOwnParser.as_view()),
    path("streamed/", csrf_exempt(after_reading(function))),
]
PATHS = [*(f"/{kind}/" for kind in KINDS), "/ninja/pay", "/ninja/apay"]
