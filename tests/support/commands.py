"""Management commands in this process."""

import io

from django.core.management import call_command


def output_of(command, *arguments, **options):
    """What the command prints."""
    output = io.StringIO()
    call_command(command, *arguments, stdout=output, **options)
    return output.getvalue().strip()
