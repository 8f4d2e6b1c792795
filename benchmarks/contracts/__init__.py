"""Task queues under the contracts of `pytest-obligation`, one test module each, in the environment of its queue."""
