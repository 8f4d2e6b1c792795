"""A root that is read-only, and no temporary directory: processes warn that `--live` fails for them"""

from tests.projects.settings.plain import *

says = "gives no life sign"
broker = True
