"""Health checks of the inbox: views for a monitor, and the checks behind `inbox_health`."""
