from inbox.contrib.outgoing_webhooks import send_webhooks
from tests.support.apps.hooked import TOPIC

send_webhooks(TOPIC)
