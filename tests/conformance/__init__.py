"""The conformance suite: what every engine must do, run over every lane of `lanes.py`."""
