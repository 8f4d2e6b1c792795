"""Optional products that need neither half: each is an app of its own, and the core imports none of them."""
