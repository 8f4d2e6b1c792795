"""The two partial indexes of ready messages, and what of a shard each of them is read by.

The *stream* contains the messages that were ready when they were inserted and have no priority. The *secondary ready index*
contains all others (prioritised, once delayed, retried, released). A message of the stream has its position since it is ready;
each other one draws another number of the same sequence when it becomes ready. A reader keeps a *floor* in that sequence, and
skips what became ready below it: the dead versions of published messages. The stream grows only at its end, so it is read from
the floor upwards. Of the secondary ready index, which has another order, the entries below the floor are passed over without
reading their rows.
"""

STREAM = "m.state = 'ready' AND m.ready_position = 0"
SECONDARY = "m.state = 'ready' AND m.ready_position > 0"


def in_stream(vendor: str, shard: str, floor: str) -> str:
    """The condition and the order of the messages of a shard in the stream above its floor."""
    return f"m.shard {equals(vendor, shard)} AND {STREAM} AND m.id > {floor} ORDER BY m.shard, m.id"


def in_secondary(vendor: str, shard: str, floor: str, order: str) -> str:
    """The same for the secondary ready index."""
    drawn_above = floor if vendor == "postgresql" else "0"  # on SQLite no other number is drawn
    return f"m.shard {equals(vendor, shard)} AND {SECONDARY} AND m.ready_position > {drawn_above} ORDER BY m.shard, {order}"


def equals(vendor: str, value: str) -> str:
    """The condition "is this value". On PostgreSQL only the index that has the rows in their order can return them in it.

    With `=` PostgreSQL knows that the order by (shard, id) is the one by id, which other indexes have, too. A plan of a table
    that is thought to be empty, where all indexes cost the same, must be right when it has a backlog.
    """
    return f"= ANY(ARRAY[{value}])" if vendor == "postgresql" else f"= {value}"
