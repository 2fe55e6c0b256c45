"""Soft page faults of a step, on whichever rank they were."""

from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace

import torch
import torch.distributed as dist
from vllm.v1.elastic_kv.residency import Residency, report_faults
from vllm.v1.outputs import ModelRunnerOutput

REQUESTS = ["whole", "torn on both", "torn on the second"]
FOUND = [[0, 1, 0], [0, 2, 3]]  # by rank


def _rank(rank, folder, answers):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=len(FOUND), timeout=timedelta(seconds=60))
    group = SimpleNamespace(world_size=len(FOUND), device_group=dist.group.WORLD, device_communicator=None)
    layout = SimpleNamespace(chunk_blocks=1, capacity_blocks=4)
    residency = Residency(layout, torch.empty(16, dtype=torch.int8))
    made = []
    for found, has_output in [(FOUND[rank], True), (FOUND[rank], rank == 0), ([0, 0, 0], True)]:
        residency.count(3).copy_(torch.tensor(found))
        output = ModelRunnerOutput(REQUESTS, {name: n for n, name in enumerate(REQUESTS)}) if has_output else None
        output = report_faults(residency, output, group)
        made.append(None if output is None else output.kv_faults)
        assert not residency.faults.any()
    answers.put((rank, made))
    dist.destroy_process_group()


def test_every_rank_reports_what_any_of_them_found(tmp_path):
    """Only one rank's output is read, and only some ranks may make one."""
    context = get_context("fork")  # vLLM is imported already
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, answers), daemon=True) for rank in range(len(FOUND))]
    for process in ranks:
        process.start()
    reported = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    torn = {"torn on both": 2, "torn on the second": 3}
    assert reported == {0: [torn, torn, {}], 1: [torn, None, {}]}


def test_the_communicator_of_the_steps_is_used_where_there_is_one():
    """Another one would take memory of the device after the cache was sized."""
    asked = []

    def all_reduce(counts, op):
        asked.append(op)
        return counts + 1

    communicator = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=False, all_reduce=all_reduce))
    group = SimpleNamespace(world_size=2, device_communicator=communicator)
    residency = Residency(SimpleNamespace(chunk_blocks=1, capacity_blocks=4), torch.empty(16, dtype=torch.int8))
    residency.count(2).copy_(torch.tensor([0, 4]))
    output = report_faults(residency, ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1}), group)
    assert output.kv_faults == {"a": 1, "b": 5}
    assert asked == [dist.ReduceOp.MAX]
