"""An app with one handler that starts from the first message of history, in processes that tests start."""

TOPIC = "newcomer.job"
NAME = "newcomer.work"
