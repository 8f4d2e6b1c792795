"""A subscription in processes that tests start and kill; the test process itself never imports it."""

TOPIC = "shop.job"
NAME = "shop.jobs"
