"""Settings in a package of modules (base, local), with `DEBUG = True` and German"""

from tests.projects.split.local import *

broker = True
