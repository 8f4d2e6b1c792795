"""An app with one ordered handler, for the processes that tests start and kill."""

STEP = "ordered.step"
