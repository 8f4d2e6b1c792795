"""The decisions of an operator about one message of the inbox; each returns whether it has changed it."""

from inbox.operators.decisions import decide, overriding, retrying, skipping


def retry(alias, row, **given):
    return not decide(alias, row, retrying(**given)).unchanged


def override_maximum_age(alias, row, **given):
    return not decide(alias, row, overriding(**given)).unchanged


def skip(alias, row, reason, **given):
    return not decide(alias, row, skipping(reason, **given)).unchanged
