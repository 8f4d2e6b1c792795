"""Delete rows on the condition that they still match, although other transactions change them.

`QuerySet.delete()` reads the rows and then deletes by primary key, also what another transaction has changed in between, if a
receiver of `pre_delete` or `post_delete` has no sender, as that of an audit app, or if rows of other tables are deleted, too.
"""

from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.db.models import DO_NOTHING, QuerySet
from django.db.models.deletion import get_candidate_relations_to_delete


def delete_matching(rows: QuerySet[Any]) -> int:
    """Delete the rows that match, without signals; their number, without the rows that are deleted with them."""
    model = rows.model
    relations: Iterable[Any] = get_candidate_relations_to_delete(model._meta)
    if all(relation.on_delete is DO_NOTHING for relation in relations):
        # It gives None if the condition cannot be met, as `pk IN ()`.
        return rows._raw_delete(rows.db) or 0  # noqa: SLF001 - Django has no public statement with its condition
    with transaction.atomic(using=rows.db):
        locked = [*rows.select_for_update().values_list("pk", flat=True)]
        return QuerySet(model, using=rows.db).filter(pk__in=locked).delete()[1].get(model._meta.label, 0)
