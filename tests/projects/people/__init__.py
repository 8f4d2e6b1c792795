"""A model of users that has an address in place of a username."""
