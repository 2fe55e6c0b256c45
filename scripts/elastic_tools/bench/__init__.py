"""Benchmarks that compare engines in pairs, on one machine and in one run."""
