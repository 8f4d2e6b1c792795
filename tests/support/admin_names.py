"""Names of the outbox's pages in the admin, and of the permissions that they need."""

LIST = "admin:outbox_outboxmessage_changelist"
DETAIL = "admin:outbox_outboxmessage_change"
VIEW, CANCEL = "view_outboxmessage", "cancel_outboxmessage"
RESCHEDULE, RESTORE, DECIDE = "reschedule_outboxmessage", "restore_outboxmessage", "decide_outboxmessage"
