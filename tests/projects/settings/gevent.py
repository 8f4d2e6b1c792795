"""gevent, with everything patched, in the processes that publish"""

from gevent import monkey

monkey.patch_all()

from tests.projects.settings.plain import *  # noqa: E402, F403
