"""An app with ordered handlers, of one topic and of two, for the processes that tests start and kill."""

STEP = "ordered.step"
CREATED, CANCELLED = "ordered.created", "ordered.cancelled"
