"""The handler's transaction and its guards."""
