"""What developers run: `make check`, `make messages` and `make screenshots` call these modules."""
