from outbox.console.trail_command import TrailCommand


class Command(TrailCommand):
    """See `TrailCommand`."""
