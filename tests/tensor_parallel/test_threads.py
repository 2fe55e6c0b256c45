"""The cores of a CPU rank on Ray."""

import pytest
from vllm.v1.executor.ray_cpu import cpus_of_rank


@pytest.mark.parametrize(
    ("setting", "rank", "local_rank", "local_world_size", "cpus"),
    [
        ("auto", 0, 0, 1, [0, 1, 4, 5]),
        ("auto", 1, 1, 2, [4, 5]),
        ("auto", 3, 1, 2, [4, 5]),  # of the second node
        ("auto", 5, 5, 6, [1]),  # more ranks than cores
        ("nobind", 0, 0, 1, None),
        ("0-1|4,5", 1, 1, 2, [4, 5]),
        ("0-1|4,5", 3, 1, 2, [4, 5]),  # lists of one node, of which there are two
        ("0-1|4,5", 1, 0, 1, [4, 5]),  # lists of all ranks, each of which is alone on its node
    ],
)
def test_each_rank_has_its_own(setting, rank, local_rank, local_world_size, cpus):
    assert cpus_of_rank(setting, rank, local_rank, local_world_size, [0, 1, 4, 5]) == cpus


@pytest.mark.parametrize("setting", ["0-1", "0|2", "0|"])
def test_cores_that_are_not_there(setting):
    with pytest.raises(ValueError, match=r"VLLM_CPU_OMP_THREADS_BIND=.*rank 1.*\[0, 1, 4, 5\].*'nobind'"):
        cpus_of_rank(setting, rank=1, local_rank=1, local_world_size=2, allowed=[0, 1, 4, 5])
