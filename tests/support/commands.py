"""Management commands in this process, and programs in processes of their own."""

import io
import subprocess

from django.core.management import call_command

from tests.support import ROOT


def output_of(command, *arguments, **options):
    """What the command prints."""
    output = io.StringIO()
    call_command(command, *arguments, stdout=output, **options)
    return output.getvalue().strip()


def ran(*command, directory=ROOT, environment=None):
    """A program after its end; `stdout` is what it has printed, also its errors."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([*map(str, command)], cwd=directory, env=environment, check=False, timeout=350, **streams)
