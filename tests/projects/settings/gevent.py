"""gevent, with everything patched, in the process that publishes and shows the pages"""

import sys

if "tests.projects.cycle" in sys.orig_argv:
    from gevent import monkey

    monkey.patch_all()

from tests.projects.settings.plain import *  # noqa: F403
