"""The relay: the process that carries committed messages to the broker."""
