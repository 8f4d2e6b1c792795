"""Crash tests: real processes, real servers, SIGKILL.

Producers write business rows and messages in one transaction; `outbox_relay` and `inbox_consume` run as processes of their
own and are killed, stopped, cut off and restarted; then everything is drained and the oracle compares what was committed
with what had an effect. The oracle knows nothing of the product: it reads two tables of the tests.

    settings, apps      how a process is started: the tests' settings, with short deadlines, and
    failpoints          where it ends itself, by the name of a function
    bugs                what is broken in it on purpose, to prove that the oracle would notice
    handlers            the effect
    world, oracle       the test's side: processes, load, the verdict
"""
