"""Soft page faults of a step, on whichever rank they were."""

from multiprocessing import get_context
from types import SimpleNamespace

import torch
import torch.distributed as dist
from vllm.v1.elastic_kv.residency import Residency, report_faults
from vllm.v1.outputs import ModelRunnerOutput

REQUESTS = ["whole", "torn on both", "torn on the second"]
FOUND = [[0, 1, 0], [0, 2, 3]]  # by rank


def _rank(rank, folder, answers):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=len(FOUND))
    layout = SimpleNamespace(chunk_blocks=1, capacity_blocks=4)
    residency = Residency(layout, torch.empty(16, dtype=torch.int8))
    made = []
    for found, has_output in [(FOUND[rank], True), (FOUND[rank], rank == 0), ([0, 0, 0], True)]:
        residency.count(3).copy_(torch.tensor(found))
        output = ModelRunnerOutput(REQUESTS, {name: n for n, name in enumerate(REQUESTS)}) if has_output else None
        output = report_faults(residency, output, dist.group.WORLD)
        made.append(None if output is None else output.kv_faults)
        assert not residency.faults.any()
    answers.put((rank, made))
    dist.destroy_process_group()


def test_every_rank_reports_what_any_of_them_found(tmp_path):
    """Only one rank's output is read, and only some ranks may make one."""
    context = get_context("fork")  # vLLM is imported already
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, answers)) for rank in range(len(FOUND))]
    for process in ranks:
        process.start()
    reported = dict(answers.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    torn = {"torn on both": 2, "torn on the second": 3}
    assert reported == {0: [torn, torn, {}], 1: [torn, None, {}]}
