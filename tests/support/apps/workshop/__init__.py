"""An app with bounded, batched and grouped handlers, in processes that tests start."""

BOUNDED = "workshop.bounded"
SINGLE = "workshop.single"
BATCHED = "workshop.batched"
GROUPED = "workshop.grouped"
TOPICS = (BOUNDED, SINGLE, BATCHED, GROUPED)
SIZE = 20
LIMIT_SECONDS = 2.0
EXIT = 13
EXITS_BEFORE = "exits before its commit"
EXITS_AFTER = "exits after its commit"
EXITS_ALWAYS = "exits whenever it is run"
