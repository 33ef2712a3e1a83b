"""Whether a run is thorough, as processes that it starts must know too."""

__all__ = ["THOROUGH"]

#: Set in the environment of everything that `pytest --thorough` starts.
THOROUGH = "TENSORSPILL_TEST_THOROUGHLY"
