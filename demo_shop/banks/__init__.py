"""An example of prepared messages, on its own: it imports nothing of the shop, and the shop nothing of it.

Money leaves the savings bank and arrives at the giro bank, which have separate databases. The giro bank is in the project's
own database, with the outbox and the inbox. The savings bank has the alias `savings`, and no outbox in it: so a transfer is a
prepared message, and the checker decides about it when its process has died.

Read `services.transfer`, then `callbacks` and `handlers`. `customer` makes transfers in a process of its own
(`manage.py demo_transfers`), which the demo kills.
"""
