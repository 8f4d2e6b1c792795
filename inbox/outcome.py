"""The outcome of a delivery."""

from enum import Enum


class Outcome(Enum):
    """The outcome of a delivery. All but DEFERRED and UNSTORED are acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    STORED = "stored"
    """Its attempt failed, or it takes the careful path; it is stored in the database."""
    DEAD = "dead"
    SHED = "shed"
    """Dropped under load: stored, not handled."""
    DEFERRED = "deferred"
    """Another transaction is handling the same message: not acknowledged, and processed again soon."""
    UNSTORED = "unstored"
    """Neither it nor its failure could be stored: not acknowledged, and processed again later."""
