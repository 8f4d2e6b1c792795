"""A topic that is sent to webhook endpoints, in processes that tests start and kill; the test process never imports it."""

TOPIC = "hooked.order"
