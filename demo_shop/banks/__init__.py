"""Two banks. Money leaves the savings bank and arrives at the giro bank, whose databases know nothing of each other.

The giro bank lives in the shop's database, beside the outbox and the inbox. The savings bank has a database of its own, the
alias `savings`, and no outbox in it: so a transfer is a prepared message, and `callbacks` says what became of it when nobody
else can.
"""
