"""Tests of the GDS engine that run on the stand-in driver, in its lanes."""
