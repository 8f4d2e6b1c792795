from outbox.console.trail_command import TrailCommand


class Command(TrailCommand):
    """The life of a message, see there."""
