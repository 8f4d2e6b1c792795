"""A join, and a request with its answer, in processes that tests start and kill; the test process never imports them."""

TOPICS = ("joined.orders", "joined.stock", "joined.prices")
NAME = "joined.report"
ASKED, ANSWERED = "joined.asked", "joined.answered"
