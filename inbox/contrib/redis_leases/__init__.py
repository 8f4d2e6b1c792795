"""An optional package: leases in Redis, so that a successful run writes nothing to the database."""
