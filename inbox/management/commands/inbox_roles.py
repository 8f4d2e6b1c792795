from django.utils.translation import gettext_lazy

from outbox.console.roles_command import RolesCommand


class Command(RolesCommand):
    help = gettext_lazy(  # type: ignore[assignment] # see TranslatedCommand
        "Create or update the groups Inbox viewer, who may only look, and Inbox operator, who may do everything."
    )
    app = "inbox"
