"""Upstream's own tests of the block manager and the scheduler give the same result on the patched engine."""

import os
import subprocess
import sys

import pytest
from elastic_tools.pins import ROOT
from elastic_tools.serve import engine_kind
from elastic_tools.upstream_tests.lists import SUITE, Group, misplaced, read_groups, read_list


@pytest.mark.upstream
@pytest.mark.skipif(engine_kind() != "cpu", reason="the list of what passes unpatched was made with the CPU engine")
def test_the_patched_engine_passes_what_the_unpatched_one_passes():
    command = [sys.executable, "-m", "elastic_tools.upstream_tests", "check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        pytest.fail(result.stderr, pytrace=False)
    print(result.stdout)


def test_the_list_and_what_is_left_out_do_not_overlap():
    listed = read_list()
    assert len(listed) == len(set(listed))
    assert all(test.startswith(SUITE) for test in listed)
    assert [test for test in listed for group in read_groups() if group.holds(test)] == []


def test_every_group_gives_a_reason():
    assert all(len(group.reason) > 20 and group.tests for group in read_groups())


def test_a_test_without_a_place_is_named():
    groups = [Group("slow", "takes an hour", ["suite::slow*"])]
    assert misplaced(["suite::a", "suite::slow[1]"], ["suite::a"], groups) == []
    assert misplaced(["suite::a", "suite::slow[1]", "suite::new"], ["suite::a"], groups) == [
        "suite::new is in neither file"
    ]


def test_a_test_with_two_places_is_named():
    groups = [Group("slow", "takes an hour", ["suite::slow*"])]
    assert misplaced(["suite::slow[1]"], ["suite::slow[1]"], groups) == ["suite::slow[1] is in slow and in the list"]


def test_a_name_that_upstream_no_longer_has_is_named():
    groups = [Group("slow", "takes an hour", ["suite::gone"])]
    assert misplaced(["suite::a"], ["suite::a", "suite::old"], groups) == [
        "suite::old is listed, but the suite has no such test",
        "suite::gone is in slow, but the suite has no such test",
    ]
