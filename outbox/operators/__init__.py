"""What operators ask about messages of the outbox, as functions: the admin, the commands and the alerts call them."""
