"""Drivers of the peers, one module each. They run in the peers' own virtual environments, never in ours.

    python -m benchmarks.peers.<driver> COUNT OPTIONS

A driver makes the tables, commits COUNT messages, and then relays them in the way the peer's own command does. It answers
`{"committed": [[id, number], …], "messages": …, "seconds": …, "faults": ""}`: what was committed; how many messages were
relayed in how many seconds, from its first settled batch to its last; and the errors that only the peer's own tables can show.
"""
