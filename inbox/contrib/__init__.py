"""Optional products: each is an app or an option of its own, and the core imports none of them."""
