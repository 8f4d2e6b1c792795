"""The handlers of the queues, as TASKS has them. The inbox discovers this module at start."""

from inbox.contrib.tasks.registering import register_queues

register_queues()
