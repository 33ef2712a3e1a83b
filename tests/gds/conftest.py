"""Tests in `inside` run in a process of a stand-in's lane, which `test_lanes` starts."""

import os

collect_ignore = [] if "STANDIN_LANE" in os.environ else ["inside"]
