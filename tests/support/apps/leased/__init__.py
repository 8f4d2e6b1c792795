"""An app with handlers under a lease, in processes that tests start, stop and kill."""

LEASED_JOB = "leased.job"
