"""Upstream's own tests, run on the unpatched and on the patched engine: the patches must change no outcome.

``tests/upstream/v1_core.txt`` lists the tests that pass unpatched on a CPU. ``tests/upstream/not_run.toml`` names the
others, with a reason. Every test of the suite is in exactly one of the two.
"""
