"""The relay: the process that sends committed messages to the broker."""
