"""What the search box of a message list understands.

    order-17                 an exact name: a message id, biz-id, topic or handler; if nothing has it, a part of an error
    order-1*                 topics and biz-ids that begin with it
    key:customer-4           an ordering key
    headers.tenant:acme      a value in the headers; a dot leads into a nested object. "header tenant=acme" is the same

An exact name has an index. For the others there is none, and they are searched among the newest messages only: see `newest`;
an error among those that are retrying or dead. A path and its value are parameters of the statement.
"""

import re
from typing import Any

from django.db.models import Q, QuerySet, TextField, Value
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast
from django.db.models.lookups import Exact
from django.http import HttpRequest
from django.utils.translation import gettext

from exactly_once.wire.text import fit, why_unfit

MOST_SEARCHED = 50_000
"""Of a list that is searched without an index: so many messages take a fraction of a second to read."""
_LONGEST_VALUE = 1_000
_DEEPEST = 8
_FIELD = re.compile(r"(?:headers?[.\s](?P<path>[^:=]*)|(?P<key>key)\s*)[:=](?P<value>.*)", re.IGNORECASE | re.DOTALL)
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
_CUT = "searched_the_newest_only"


class BadSearch(ValueError):
    """The text cannot be searched for; the error says why, for the page."""


def read(text: str) -> str | Q:
    """The search in a text: an exact name, "" to find everything, or a condition without an index.

    Raises:
        BadSearch: it cannot be searched for.
    """
    term = text.strip()
    field = _FIELD.fullmatch(term)
    if field:
        return _field(field)
    if not term.endswith("*"):
        return fit(term) if term else ""
    beginning = term.rstrip("*")
    if not beginning:
        raise BadSearch(gettext("Write the beginning of a topic or biz-id before the *."))
    if why_unfit(beginning):
        raise BadSearch(gettext("A topic or biz-id cannot begin with this text: it is too long, or has control characters."))
    return Q(topic__startswith=beginning) | Q(biz_id__startswith=beginning)


def _field(found: re.Match[str]) -> Q:
    path, value = (found["path"] or "").strip(), found["value"].strip()
    if not value:
        raise BadSearch(gettext("Write the value to search for after the “:”."))
    if len(value) > _LONGEST_VALUE or "\x00" in value:
        raise BadSearch(gettext("The value is too long to be searched for, or has control characters."))
    if found["key"]:
        return Q(key=fit(value))
    if not _PATH.fullmatch(path) or path.count(".") >= _DEEPEST:
        words = gettext(
            "“%(path)s” is not the path of a header. Write names of letters, digits, “_” and “-”, with a dot between "
            "them: headers.tenant:acme"
        )
        raise BadSearch(words % {"path": path})
    return _headers_have(tuple(path.split(".")), value)


def _headers_have(path: tuple[str, ...], value: str) -> Q:
    """The messages whose headers have this value at the path, also if the dots are part of a header's name."""
    paths = {path, (".".join(path),)}
    found = Q()
    for names in sorted(paths):
        place: Any = "headers"
        for name in names[:-1]:
            place = KeyTransform(name, place)
        text = Cast(KeyTextTransform(names[-1], place), TextField())
        found |= Q(Exact(text, Value(value)))
    return found


def newest(request: HttpRequest, rows: QuerySet[Any], column: str, *, oldest: bool = False) -> QuerySet[Any]:
    """The newest of these rows, or the oldest, up to a limit: a condition without an index reads no more of them.

    The request keeps whether rows were left out, see `is_cut`.

    Args:
        column: grows with time, and has an index.
    """
    order, beyond = (column, "lt") if oldest else (f"-{column}", "gt")
    edge = list(rows.order_by(order).values_list(column, flat=True)[MOST_SEARCHED : MOST_SEARCHED + 1])
    if not edge:
        return rows
    setattr(request, _CUT, True)
    return rows.filter(**{f"{column}__{beyond}": edge[0]})


def is_cut(request: HttpRequest) -> bool:
    """Were rows left out because a condition of this list has no index?"""
    return getattr(request, _CUT, False)
