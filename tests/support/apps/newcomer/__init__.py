"""An app whose one handler wants the messages from the first one on; it lives in processes that tests start."""

TOPIC = "newcomer.job"
NAME = "testnewcomer.work"
