"""What both halves must agree on: the form of a message, of failure, of a retry, of a loop.

It is plain Python without Django: no model, no setting, no SQL and no HTML, so that the outbox and the inbox can each be
installed without the other and still speak the same language.
"""
