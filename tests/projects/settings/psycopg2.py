"""psycopg 2, without psycopg 3"""

import sys

sys.modules["psycopg"] = None  # type: ignore[assignment]

from tests.projects.settings.plain import *  # noqa: E402

broker = True
