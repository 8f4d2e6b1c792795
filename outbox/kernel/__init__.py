"""What both halves must agree on: the form of a message, of time, of failure, of a loop.

No model, no setting and no connection is read here, so that the outbox and the inbox can each be installed without the
other and still speak the same language.
"""
