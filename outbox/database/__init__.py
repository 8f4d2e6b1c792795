"""Database code that both apps share: SQL without a model, classification of errors, and handling of connections."""
