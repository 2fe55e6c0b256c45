"""Tests of the patch set tool."""
