"""What bounds a handler: its rate, and load shedding."""
