"""Whether a run is thorough, as processes that it starts must know too."""

import os

__all__ = ["THOROUGH", "examples"]

#: Set in the environment of everything that `pytest --thorough` starts.
THOROUGH = "TENSORSPILL_TEST_THOROUGHLY"


def examples(many: int) -> int:
    """Return how many examples hypothesis tries where thorough runs try `many`."""
    return many if THOROUGH in os.environ else max(4, many // 4)
