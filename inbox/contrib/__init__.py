"""Optional products: each is an app or an option of its own, and the core imports none of them."""

from exactly_once.packages import looked_up, require_app

__all__ = ["looked_up", "require_app"]
