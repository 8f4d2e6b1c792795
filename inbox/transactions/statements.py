"""Does a statement end or begin a transaction, or write?

Most statements contain none of the keywords. In the others, comments, quoted text and quoted names are skipped, and each
statement of the string is checked.
"""

import re
from typing import Any

_CONTROL = re.compile(
    r"(?:begin|commit|end|abort|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE,
)
_KEYWORDS = re.compile(r"\b(?:begin|commit|end|abort|start|prepare|rollback)\b", re.IGNORECASE)
# The bodies of functions and triggers contain statements.
_DEFINES = re.compile(r"\s*create\b", re.IGNORECASE)
_SKIPPED = re.compile(
    r"""/\*|--[^\n]*|\be'(?:[^'\\]|''|\\.)*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$((?:[a-z_]\w*)?)\$.*?\$\1\$""",
    re.IGNORECASE | re.DOTALL,
)
_COMMENT = re.compile(r"/\*|\*/")
_LOCKS = re.compile(r"\bfor\s+(?:(?:no\s+key\s+)?update|(?:key\s+)?share)\b", re.IGNORECASE)
_WRITES = re.compile(
    r"\s*(?:insert|update|delete|merge|truncate|copy\b.*\bfrom|with\b.*(?<!for )(?<!key )\b(?:insert|update|delete))\b",
    re.IGNORECASE | re.DOTALL,
)


def writes(text: str) -> bool:
    """Is this a statement that writes? Functions that write are not known."""
    return _WRITES.match(text) is not None


def locks(text: str) -> bool:
    """Is this a statement that locks rows?"""
    return writes(text) or _LOCKS.search(text) is not None


def controls_transaction(statement: object, connection: Any) -> str:
    """The text of `statement`, in any driver's form, if it begins, ends or prepares a transaction; else ""."""
    text = text_of(statement, connection)
    if not _KEYWORDS.search(text):
        return ""
    first, *others = _bare(text, nested=connection.vendor == "postgresql").split(";")
    statements = [first] if _DEFINES.match(first) else [first, *others]
    return text if any(_CONTROL.match(one.lstrip()) for one in statements) else ""


def text_of(statement: object, connection: Any) -> str:
    """The text of `statement`, in any driver's form."""
    if isinstance(statement, bytes):
        return statement.decode("latin-1")
    # psycopg composes statements from parts.
    as_string = getattr(statement, "as_string", None)
    return str(as_string(connection.connection) if as_string else statement)


def _bare(text: str, *, nested: bool) -> str:
    """`text` without comments, quoted text and quoted names."""
    pieces, at = [], 0
    while found := _SKIPPED.search(text, at):
        pieces.append(text[at : found.start()])
        at = _end_of_comment(text, found.end(), nested=nested) if found.group() == "/*" else found.end()
    return " ".join([*pieces, text[at:]])


def _end_of_comment(text: str, at: int, *, nested: bool) -> int:
    depth = 1
    for found in _COMMENT.finditer(text, at):
        if found.group() == "*/":
            depth -= 1
        elif nested:
            depth += 1
        if not depth:
            return found.end()
    return len(text)
