"""The handler's transaction, and what keeps it whole."""
