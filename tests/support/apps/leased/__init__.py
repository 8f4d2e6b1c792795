"""An app whose lease-mode handlers live in processes that tests start, stop and kill."""

LEASED_JOB = "leased.job"
