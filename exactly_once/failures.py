"""What failed and where: the class of an exception, and the innermost frame of the project's own code.

Both are short and do not contain values, so messages that fail for one reason have the same class and place. Frames of the
standard library, of installed packages and of this package are not the project's own.
"""

import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import Path

from exactly_once.packages import registered
from exactly_once.wire.text import NAME_LENGTH, describe

DEFERRED = "deferred"
"""The class of a message that its handler deferred. That is not a failure."""
REFUSED = "refused"
"""The class of a message that is a dead letter without having been run."""
NEVER_ENDED = "attempt never ended"
"""The class of a message whose attempts ended with their process."""
COMMITTED_BY_ITSELF = "handler committed by itself"
"""The class of a message whose handler ended the transaction and failed afterwards."""
RAN_FOR = "exactly_once_ran_for"
"""The attribute of an exception that says for how many seconds the function ran that raised it."""

_PACKAGES = ("site-packages", "dist-packages")
_LIBRARY = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")})
_MOST_CAUSES = 20


def class_of(error: BaseException) -> str:
    """The dotted name of the exception's class; of a built-in one, its name alone."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return name[-NAME_LENGTH:]


def place_of(error: BaseException) -> str:
    """`file:function:line` of the innermost frame of the project's own code; "" if there is none.

    If the exception has no such frame, as when a library's thread raised it, its causes are searched.
    """
    for one in _chain(error):
        own = [frame for frame in _frames(one) if is_own(frame.filename)]
        if own:
            return f"{_short(own[-1].filename)}:{own[-1].name}:{own[-1].lineno or 0}"[-NAME_LENGTH:]
    return ""


def own_frames(error: BaseException) -> str:
    """The project's own frames of the exception and its causes, as in a traceback; "" if there are none."""
    own = ((one, [frame for frame in _frames(one) if is_own(frame.filename)]) for one in reversed(_chain(error)))
    return "\n".join(
        f"{''.join(traceback.format_list(frames))}{type(one).__name__}: {describe(one)}\n" for one, frames in own if frames
    )


@lru_cache(maxsize=1024)
def is_own(file: str) -> bool:
    """Is this file the project's own code?"""
    ours = tuple(f"{Path(__file__).resolve().parents[1] / app}/" for app in ("exactly_once", *registered()))
    return not (file.startswith(("<", *ours, *_LIBRARY)) or any(f"/{name}/" in file for name in _PACKAGES))


def without_line(place: str) -> str:
    """The place without its line, which an unrelated change of the file moves."""
    return place.rpartition(":")[0]


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.extract_tb(error.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and its causes, as a traceback shows them: the last one raised first."""
    one: BaseException | None = error
    found: dict[int, BaseException] = {}
    while one is not None and id(one) not in found and len(found) < _MOST_CAUSES:
        found[id(one)] = one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return [*found.values()]


@lru_cache(maxsize=1024)
def _short(file: str) -> str:
    """The file's path from the directory that Python imports it from, so that it is the same on every host."""
    roots = [root for root in (*sys.path, str(Path.cwd())) if root and file.startswith(f"{root.rstrip('/')}/")]
    return file[len(max(roots, key=len).rstrip("/")) + 1 :] if roots else file
