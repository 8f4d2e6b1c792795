"""What operators ask and decide about the outbox, as functions: the admin, the commands, the alerts and the HTTP API call them.

A relay process executes the operations that are planned here, see `operations` and `replaying`; its passes do not need this
package.
"""
