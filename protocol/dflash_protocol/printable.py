"""Texts that others wrote, made fit to be shown: of files, of peers, of clients.

A terminal obeys control characters, a log's reader believes in lines, and some characters show a
text in another order than it has. Everything that prints, logs or answers with such a text passes
it through `printable`.
"""

from __future__ import annotations

MOST_CHARACTERS = 1000
_CUT = "…"


def printable(text: object, limit: int = MOST_CHARACTERS) -> str:
    """A text as at most `limit` characters of one line, without any that a terminal obeys.

    Escaped as in Python's literals are all but letters, marks, digits, punctuation, symbols and the
    space of ASCII: control characters (C0, DEL, C1), separators of lines and paragraphs, other
    spaces, format characters (those of direction among them), lone surrogates, and what has no
    meaning yet. A text that is longer is cut, and ends with ``…``.
    """
    shown = str(text)
    is_cut = len(shown) > limit
    if is_cut:
        shown = shown[:limit]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
        is_cut = is_cut or len(shown) > limit
    return shown[: limit - 1] + _CUT if is_cut else shown
