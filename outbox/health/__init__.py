"""Health checks of the outbox: views for a monitor, and the checks behind `outbox_health`."""
