"""A minimal business: an account that changes, a sale that is recorded, and an effect."""
