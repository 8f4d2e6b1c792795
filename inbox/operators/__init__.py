"""What operators ask and decide about the inbox, as functions: the admin, the commands, the metrics and the HTTP API call them.

Nothing that handles messages needs this package; it stands on `inbox.store` and `inbox.receiving`. What both apps have in
common is in `exactly_once.console.operators`.
"""
