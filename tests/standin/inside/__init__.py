"""Tests that run in a lane: that the stand-ins do what hardware does, and the libraries on them."""
