"""Parts of the regular expressions that several formats share."""

from __future__ import annotations

SPACE = r"[ \t\r\n]*+"

# In leads, and in their beginnings, where nothing may be longer than in the lead.
SOME_SPACE = r"[ \t\r\n]{0,99}+"
NAME = r"[^ \t\r\n<>\"'()\[\]{},=]{1,128}+"
NAME_PART = r"[^ \t\r\n<>\"'()\[\]{},=]{0,128}+"
