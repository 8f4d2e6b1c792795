from inbox.http import subscribe
from tests.support.apps.subscribed import NAME, TOPIC

subscribe(TOPIC, name=NAME)
