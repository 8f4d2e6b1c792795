from inbox.contrib.http import subscribe
from tests.support.apps.subscribed import NAME, TOPIC

subscribe(TOPIC, name=NAME)
