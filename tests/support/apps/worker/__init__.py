"""An app with handlers in processes that tests start; the test process itself never imports them."""

JOB = "worker.job"
CHAINED = "worker.chained"
NAMED = "worker.named"
