"""What both halves must agree on: the form of a message, of time, of failure, of a loop.

No model and no setting of ours is read here and no connection is made, so that the outbox and the inbox can each be installed
without the other and still speak the same language.
"""
