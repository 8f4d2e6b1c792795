"""An app with one handler that has a rate limit and sheds, in processes that tests start."""

TOPIC = "limited.job"
NAME = "limited.work"
RATE = 200
ABOVE = 1500
