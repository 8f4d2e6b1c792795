"""Signals of the webhook view, for metrics and alerts only. They are not guaranteed, so no effect may depend on one."""

from django.dispatch import Signal

conflicting_event = Signal()
"""An event has the id of an earlier one and different content. It was answered with 409 and not stored. Arguments: `topic`,
`biz_id`, `message_id` of the earlier one. Sent after the transaction, with `send_robust`: an error in a receiver is logged."""
