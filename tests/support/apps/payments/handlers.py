"""The first example of the page."""

from tests.support.apps.effects.models import Payment
from tests.support.apps.payments.companies import Bank, StockService
from tests.support.pages import DOCS, blocks_of

example = next(blocks_of(DOCS / "how-to" / "effects-outside-the-database.md"))
names = {"__name__": __name__, "bank": Bank(), "stock_service": StockService(), "Payment": Payment}
exec(compile(example.source, example.place, "exec"), names)
