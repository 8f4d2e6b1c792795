"""A schedule and the handler of its messages, in processes that tests start and kill; the test process has no such schedule."""

import os
from datetime import timedelta

NAME, TOPIC = "scheduled.recount", "stock.recount"
EVERY = timedelta(seconds=float(os.environ.get("EVERY_SECONDS", "25200")))
