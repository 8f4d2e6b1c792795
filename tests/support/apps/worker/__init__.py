"""An app whose handlers live in processes that tests start; the test process itself never imports them."""

JOB = "worker.job"
CHAINED = "worker.chained"
NAMED = "worker.named"
NAMED_AND_ORDERED = "worker.named_and_ordered"
NAMED_AND_LEASED = "worker.named_and_leased"
