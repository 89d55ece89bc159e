"""How the files of a split model are named, ``<stem>-00001-of-000NN.gguf``; imports nothing.

`shards` opens them; `library.file_sets` finds them by name, before any is there.
"""

from __future__ import annotations

import re

# Each shard takes two descriptors (its own and the mapping's); the usual limit is 1024 a process.
MAX_SHARDS = 256

SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
"""Of a whole file name; numbers begin with 1."""
