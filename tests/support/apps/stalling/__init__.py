"""An app whose checkers and callbacks hang, or wait for the test. The topic says what they do."""

CHECKED, CHECKED_IN_VAIN = "stalling.checked", "stalling.checked-in-vain"
"""Prepared messages: the checker of the second never returns, unless the payload says `is_answered`."""
WAITING, HANGING, QUICK = "stalling.waiting", "stalling.hanging", "stalling.quick"
"""Published messages: the callback of the first returns when the test says so, that of the second never, the third at once."""
