"""What the helpers for tests of both apps share: the restriction to tests, time travel, and the comparison of messages."""
