from django.utils.translation import gettext_lazy

from outbox.console.roles_command import RolesCommand


class Command(RolesCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "Create or update the groups Outbox viewer, who may only look, and Outbox operator, who may do everything."
    )
    app = "outbox"
