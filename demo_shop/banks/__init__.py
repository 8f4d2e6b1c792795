"""Two banks. Money leaves the savings bank and arrives at the giro bank, which have separate databases.

The giro bank is in the shop's database, with the outbox and the inbox. The savings bank has a database of its own, the
alias `savings`, and no outbox in it: so a transfer is a prepared message, and the checker in `callbacks` decides
about it when its process has died.
"""
