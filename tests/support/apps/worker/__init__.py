"""An app whose handlers live in processes that tests start; the test process itself never imports them."""

JOB = "worker.job"
CHAINED = "worker.chained"
NAMED = "worker.named"
