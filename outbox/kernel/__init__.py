"""Code that the outbox and the inbox share: the message format, failures, retries and loops.

It is plain Python without Django: it contains no models, settings, SQL or HTML. So each app can be installed without the
other, and both use the same formats.
"""
