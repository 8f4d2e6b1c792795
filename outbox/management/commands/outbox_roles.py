from outbox.console.roles_command import RolesCommand


class Command(RolesCommand):
    help = "Create or update the groups Outbox viewer, who may only look, and Outbox operator, who may do everything."
    app = "outbox"
