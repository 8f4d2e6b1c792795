"""Settings of a project whose databases have Django's connection pool."""
