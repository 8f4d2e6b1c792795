"""What a declaration of the states of a message consists of: its transitions, each declared once, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import TextChoices


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A transition from some states to others.

    Attributes:
        sources: the states that it leads from; none for a new message. A row in any other state is not changed.
        targets: the state that it leads to; two states if the row or its key decides between them.
        when: its cause, for the documentation.
        needs: the values of further columns of a row that allow it.
        sets: what it writes, by column, without the state.
        recorded: whether the trail records it with `"TRAIL": "decisions"`. With "all" every transition is recorded.
        permission: what an operator needs to make it; "" if operators do not, or if several actions make it.
    """

    name: str
    sources: tuple[TextChoices, ...]
    targets: tuple[TextChoices, ...]
    when: str
    needs: Mapping[str, Any] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = True
    permission: str = ""

    @property
    def columns(self) -> dict[str, Any]:
        """What it writes, with the state, if it leads to one state."""
        return {"state": self.targets[0], **self.sets}

    def allows(self, row: Any) -> bool:
        """Does it lead from the present state of the row?"""
        return row.state in self.sources and all(getattr(row, name) == value for name, value in self.needs.items())
