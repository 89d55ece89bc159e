"""How many examples a property is tried with: fewer in `make test` than in `make test-all`."""

from __future__ import annotations

import hypothesis

SHARE = "share"
"""Name of the profile of a run without the slow tests."""


def examples(num_examples: int) -> hypothesis.settings:
    """For a property of which so many examples are drawn; in a run without slow tests, a third."""
    if hypothesis.settings.get_current_profile_name() == SHARE:
        num_examples = -(-num_examples // 3)
    return hypothesis.settings(max_examples=num_examples)
