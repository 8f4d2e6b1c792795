"""The page that shows the result of a dry run."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from exactly_once.admin.attempts import attempts
from exactly_once.display import Tone, as_text, badge, folded, identifier
from exactly_once.operators.redaction import Redaction
from inbox.dry_run import DryRun

DRY_RUN = "exactly_once/dry_run.html"

_OUTCOMES = {
    "handled": (_("It would be handled"), Tone.DONE),
    "deferred": (_("It would be deferred"), Tone.LATER),
    "rejected": (_("It would become a dead letter"), Tone.STOPPED),
    "failed": (_("It would fail"), Tone.FAILING),
    "timed out": (_("It did not end in time"), Tone.STOPPED),
}


def shown_dry_run(result: DryRun, redaction: Redaction) -> dict[str, Any]:
    """The result, for the template. The parameters of statements are values of the payload, so redaction leaves them out."""
    label, tone = _OUTCOMES[result.outcome]
    failure = result.failure
    shown = None
    if failure is not None:
        shown = attempts(
            [
                {
                    "attempt": failure.attempts,
                    "error": failure.error,
                    "class": failure.error_class,
                    "place": failure.error_place,
                    "own": failure.own_frames,
                    "traceback": failure.traceback,
                }
            ]
        )
    return {
        "outcome": badge(str(label), tone),
        "failure": shown,
        "writes": [as_text(write.sql if redaction else str(write)).as_html() for write in result.writes],
        "more_writes": result.more_writes,
        "published": [
            (
                identifier(f"{one.topic} {one.biz_id}"),
                folded(
                    gettext("Show the payload"),
                    redaction.shown(one.body, one.content_type, topic=one.topic, headers=one.headers).as_html(),
                ),
            )
            for one in result.published
        ],
        "hooks": result.hooks,
        "read_only": ", ".join(sorted(set(result.read_only))),
        "is_handled": result.outcome == "handled",
    }
