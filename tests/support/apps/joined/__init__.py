"""A join in processes that tests start and kill; the test process itself never imports it."""

TOPICS = ("joined.orders", "joined.stock", "joined.prices")
NAME = "testjoined.report"
