"""Numbers of hypothesis examples: fewer in `make test` than in `make test-all`."""

from __future__ import annotations

import hypothesis

SHARE = "share"
"""Name of the hypothesis profile of a run without slow tests."""


def examples(num_examples: int) -> hypothesis.settings:
    """Settings for `num_examples` examples; a third of them in a run without slow tests."""
    if hypothesis.settings.get_current_profile_name() == SHARE:
        num_examples = -(-num_examples // 3)
    return hypothesis.settings(max_examples=num_examples)
