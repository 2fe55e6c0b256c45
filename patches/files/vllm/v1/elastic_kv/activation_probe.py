# SPDX-License-Identifier: Apache-2.0
"""Measures, on one rank, what steps take for their activations. The engine core calls it before the engine is ready."""

import ctypes
import re
import resource
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20  # bytes
_CLEAR_PEAK = "5"  # proc(5), clear_refs: reset the peak of the resident set


def measure_activations(
    worker: Any, plain: Sequence[int], with_prompt_logprobs: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The peaks of steps of so many tokens, in bytes above what the rank holds between steps, without and with the
    log probabilities of prompts.

    Args:
        worker: The rank. Its cache is there, and no request is.
        plain: Tokens of the steps, in ascending order: what an allocator keeps of a smaller step then counts.
        with_prompt_logprobs: The same for those with.

    """
    runner = worker.model_runner
    with torch.inference_mode():
        # What is allocated once and for all is no part of a step.
        _step(runner, plain[0], prompt_logprobs=True)
        trim(worker)
        meter = _CudaMeter(worker.device) if worker.device.type == "cuda" else _HostMeter()
        scored = {tokens: meter.peak(partial(_step, runner, tokens, True)) for tokens in with_prompt_logprobs}
        trim(worker)
        peaks = {tokens: meter.peak(partial(_step, runner, tokens, False)) for tokens in plain}
    trim(worker)
    return peaks, scored


def trim(worker: Any) -> None:
    """Give back what allocators keep for the next step."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
        torch.cuda.empty_cache()
    elif hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def return_at_once(worker: Any) -> None:
    """Let the C library give large allocations back to the system when they are freed, instead of learning to keep
    them (mallopt(3)). What a process has then follows what it uses, as on a device.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def data_bytes(worker: Any) -> int:
    """Memory of this process that counts against a memory budget."""
    return _status("VmData")


def limit_data(worker: Any, nbytes: int) -> None:
    """Let allocations of this process fail beyond `nbytes`, as those of a device do that is full (setrlimit(2))."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))


class _HostMeter:
    """Peaks of the process's resident memory."""

    def __init__(self) -> None:
        self._before = _status("VmRSS")

    def peak(self, step: Callable[[], None]) -> int:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
        step()
        return max(0, _status("VmHWM") - self._before)


class _CudaMeter:
    """Peaks of what torch's allocator takes from the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    def peak(self, step: Callable[[], None]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        step()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._before)


def _step(runner: Any, tokens: int, prompt_logprobs: bool) -> None:
    """What a step of `tokens` tokens does: the model at the longest context, log probabilities of prompts, a grammar's
    mask on every row, and sampling for as many sequences as there can be.
    """
    hidden, sampled = _forward(runner, tokens)
    if prompt_logprobs:
        _prompt_logprobs(runner, hidden)
    rows = min(runner.max_num_reqs, runner.max_num_tokens)
    hidden = hidden[:1].expand(rows, -1) if len(sampled) < rows else sampled
    _mask(runner, runner.model.compute_logits(hidden))
    runner._dummy_sampler_run(hidden)


def _forward(runner: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of all tokens, and of the last of each request."""
    if hasattr(runner, "input_batch"):
        hidden, sampled = runner._dummy_run(
            tokens,
            force_attention=True,
            profile_seq_lens=runner.max_model_len,
            skip_eplb=True,
            allow_microbatching=False,
        )
    else:  # model runner V2
        context = max(0, runner.max_model_len - tokens)
        hidden, sampled = runner._dummy_run(tokens, context_len=context, skip_eplb=True)
    return hidden, sampled


def _prompt_logprobs(runner: Any, hidden: torch.Tensor) -> None:
    """As `_get_prompt_logprobs_dict` has it, for one request that takes the whole step."""
    logits = runner.model.compute_logits(hidden)
    targets = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    runner.sampler.gather_logprobs(runner.sampler.compute_logprobs(logits), 1, targets)


def _mask(runner: Any, logits: torch.Tensor) -> None:
    """What a grammar takes: a mask with a bit for each token and row, on the host and on the device."""
    words = -(-logits.shape[1] // 32)
    mask = torch.full((len(logits), words), -1, dtype=torch.int32).to(logits.device)
    kept = logits if logits.device.type == "cuda" else logits.float().clone()
    kept.view(len(logits), -1)[:, 0] += mask[:, 0]


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found, f"{_STATUS} has no {field}"
    return int(found[1]) << 10


_libc = ctypes.CDLL(None)
