"""An app whose one handler has a rate limit and sheds; it lives in processes that tests start."""

TOPIC = "limited.job"
NAME = "testlimited.work"
RATE = 200
ABOVE = 1500
