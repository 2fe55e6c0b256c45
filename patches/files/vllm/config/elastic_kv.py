# SPDX-License-Identifier: Apache-2.0
"""Configuration of the elastic KV cache (``--elastic-kv-config``)."""

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator
from vllm import envs
from vllm.config.utils import config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.elastic_kv.page_driver import check_driver
from vllm.v1.elastic_kv.reserve import LENDING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_LIMIT = 2**62
_LONGEST = 64  # characters of a value that is read or shown
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: Any) -> int:
    """Bytes in `value`: a whole number of bytes, or text such as ``"512MiB"``. Text
    with a fraction, such as ``"0.3GiB"``, is rounded down to whole bytes.

    Raises:
        ValueError: It is not a positive, finite size. The message names the value.

    """
    number: int | float = 0
    if isinstance(value, str):
        match = _SIZE.fullmatch(value) if len(value) <= _LONGEST else None
        if match is not None and match[2].upper() in _UNITS:
            number = math.floor(Fraction(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = value
    if not 1 <= number < _LIMIT or number != int(number):  # NaN compares false
        raise ValueError(
            f"{shown(value)} is not a size: give bytes as a whole number below 2**62, "
            "or text such as '512MiB' or '1.5GiB'"
        )
    return int(number)


def shown(value: Any) -> str:
    """`value` as a message can show it: in full if it is short, else its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out an int of more than 4,300 digits
        return f"a value of type {type(value).__name__} too long to be shown"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


@config
class ElasticKVConfig:
    """Configuration of the elastic KV cache: a cache that grows and shrinks
    while the engine runs. Sizes are bytes, or text with a unit (KiB, MiB, GiB,
    TiB), and count on every rank, as `--kv-cache-memory-bytes` does.
    """

    base: int | str | None = None
    """What always stays resident. A shrink never goes below it. Without it,
    one chunk: the smallest run of blocks that the page driver can map."""

    start: int | str | None = None
    """What is resident when the engine starts. The same as
    `--kv-cache-memory-bytes`, of which only one may be given. Without it, what
    the engine would have taken for a cache of fixed size."""

    capacity: int | str | None = None
    """What the cache may grow to. Address space is reserved for it at start-up,
    memory is not. Without it, what the device could hold at start-up."""

    policy: Literal["static", "on-demand", "small-chunk", "reclaim", "adaptive", "always-lent"] = "static"
    """Who decides the size. `static`: it stays until someone asks for another
    one, through `POST /elastic_kv/resize` or `LLM.resize_kv_cache`. `on-demand`:
    it grows from `start` to `capacity`, or to the size that was asked for last,
    when a request needs blocks and before a cached prefix is evicted. With either,
    a request that is the only one and needs more than there is makes it grow.

    The others measure, at start-up, what steps take for their activations, and lend the cache what is kept for
    the largest step. `reclaim`: lent while no step needs it, taken back before one that does, which waits for it.
    `adaptive`: the same, but where that costs evictions or copies, steps are smaller meanwhile and nothing waits.
    `small-chunk`: steps have `small_chunk` tokens at most, and what larger ones would take is the cache's for good.
    `always-lent`: lent and never taken back, which a large step does not survive; for benchmarks."""

    small_chunk: int = 512
    """Tokens that a step has at most with the policy `small-chunk`, if that is enough
    for all requests that decode."""

    lend_after_s: float = 2.0
    """Seconds without a step that needs the reserve, after which `reclaim` and
    `adaptive` lend it again. A trickle of prompts then does not move it to and fro."""

    memory_budget: int | str | None = None
    """Memory that each worker process may have, on a CPU. Allocations beyond it
    fail, as on a GPU that is full. Without `start`, the cache gets what the
    weights, the reserve and `margin` leave of it."""

    unsafe_always_lent: bool = False
    """Whether the policy `always-lent`, which ends the engine, may be chosen."""

    admin_api: bool | None = None
    """Whether `POST /elastic_kv/resize` is served. Without it, only if the
    server has an API key, which the route then asks for."""

    driver: Literal["auto", "host", "cuda"] = "auto"
    """Which page driver maps the memory. `auto` takes the one for the device
    that the engine runs on: `host` for a CPU, `cuda` for an NVIDIA GPU."""

    margin: int | str = 256 * 2**20
    """GPU memory that is left free when the engine starts with what upstream
    would have taken: for what is allocated later, and for cutting handles, one
    at a time. On a CPU it counts with `memory_budget` alone."""

    run: int | str | None = None
    """GPU memory of a run of chunks that share handles, at most, over all layers.
    A cut needs as much free memory as one layer has of it. Without it, what the
    costs of the driver's calls make best, but no more than `margin` for each layer."""

    keep: int | str | None = None
    """Released GPU memory to keep at hand for the next growth, at most. It is
    given up when there is too little memory. Without it, none is kept."""

    @field_validator("base", "start", "capacity", "margin", "run", "keep", "memory_budget", mode="before")
    @classmethod
    def _to_bytes(cls, value: Any) -> int | None:
        return None if value is None else parse_size(value)

    def __post_init__(self) -> None:
        if self.policy == "always-lent" and not self.unsafe_always_lent:
            raise ValueError(
                "elastic_kv_config: policy 'always-lent' ends the engine at the first large step; it is for benchmarks,"
                " with unsafe_always_lent"
            )
        if self.small_chunk < 1 or not 0 <= self.lend_after_s < math.inf:
            raise ValueError("elastic_kv_config: small_chunk has to be 1 at least, and lend_after_s 0 at least")
        for low, high in (("base", "start"), ("start", "capacity"), ("base", "capacity")):
            smaller, larger = self.size(low), self.size(high)
            if smaller is not None and larger is not None and smaller > larger:
                raise ValueError(f"elastic_kv_config: {low} ({smaller} bytes) is larger than {high} ({larger} bytes)")

    @property
    def keeps_reserve(self) -> bool:
        """Whether memory is kept for the activations of the largest step, by measurement."""
        return self.policy in LENDING or self.memory_budget is not None

    @property
    def _most_in_budget(self) -> int:
        """Bytes that the cache starts with under a budget, until it is known what else the process takes: without a
        size, upstream takes what the machine has.
        """
        return min(filter(None, [self.size("memory_budget"), self.size("capacity")]))

    def size(self, name: str) -> int | None:
        """The named size in bytes, or None where it was not given."""
        value = getattr(self, name)
        return None if value is None else parse_size(value)

    def verify_and_update(self, vllm_config: "VllmConfig") -> None:
        """Refuse what an elastic cache cannot serve, and make `start` the size
        that the engine begins with.

        Raises:
            ValueError: A setting of `vllm_config` excludes an elastic cache.

        """
        cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
        attention = vllm_config.attention_config
        # Refuse a device without a page driver now, not after the weights are loaded.
        check_driver(self.driver, vllm_config.device_config.device_type)
        refused = {
            "a KV connector (--kv-transfer-config), which may hold on to addresses whose pages come and go": (
                vllm_config.kv_transfer_config is not None
            ),
            "--kv-offloading-size, which adds a KV connector": cache.kv_offloading_size is not None,
            "sleep mode (--enable-sleep-mode), which takes the cache away by its own allocator": (
                model is not None and model.enable_sleep_mode
            ),
            "--enable-cumem-allocator, whose pool is meant to hold the cache": (
                model is not None and model.enable_cumem_allocator
            ),
            "--num-gpu-blocks-override, which fixes the number of blocks; use start and capacity": (
                cache.num_gpu_blocks_override is not None
            ),
            f"--data-parallel-size {parallel.data_parallel_size}": parallel.data_parallel_size > 1,
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
            f"--prefill-context-parallel-size {parallel.prefill_context_parallel_size}": (
                parallel.prefill_context_parallel_size > 1
            ),
            f"--decode-context-parallel-size {parallel.decode_context_parallel_size}": (
                parallel.decode_context_parallel_size > 1
            ),
            "--distributed-executor-backend external_launcher, where each process would have its own size": (
                parallel.distributed_executor_backend == "external_launcher"
            ),
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0, Ray's former executor, which does not report faults": (
                parallel.distributed_executor_backend == "ray" and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
            ),
            "elastic expert parallelism (--enable-elastic-ep)": parallel.enable_elastic_ep,
            "HiSparse, which keeps a second pool of blocks": attention.hisparse_config is not None,
            "a pooling model on ELASTIC_TRITON, whose faults only a step that samples tokens reports": (
                model is not None
                and model.runner_type == "pooling"
                and AttentionBackendEnum.ELASTIC_TRITON in (attention.backend, *attention.backend_per_kind.values())
            ),
        }
        for reason, present in refused.items():
            if present:
                raise ValueError(f"The elastic KV cache does not work with {reason}.")
        if self.keeps_reserve:
            self._verify_reserve(vllm_config)
        start = self.size("start")
        if start is None:
            if self.memory_budget is not None:
                cache.kv_cache_memory_bytes = self._most_in_budget
            return
        if cache.kv_cache_memory_bytes not in (None, start):
            raise ValueError(
                f"Give either elastic_kv_config start ({start} bytes) or --kv-cache-memory-bytes "
                f"({cache.kv_cache_memory_bytes}), not both."
            )
        cache.kv_cache_memory_bytes = start

    def _verify_reserve(self, vllm_config: "VllmConfig") -> None:
        """Refuse what the measured reserve does not cover."""
        model, budget = vllm_config.model_config, self.size("memory_budget")
        refused = {
            "--no-enable-chunked-prefill: a step must be able to have a part of a prompt": (
                not vllm_config.scheduler_config.enable_chunked_prefill
            ),
            "a multimodal model, whose encoder's activations are not measured": (
                model is not None and model.is_multimodal_model
            ),
            "a pooling model": model is not None and model.runner_type == "pooling",
            "keep, which keeps memory that was taken back": self.keep is not None,
        }
        for reason, present in refused.items():
            if present:
                raise ValueError(f"The prefill reserve of an elastic KV cache does not work with {reason}.")
        if budget is None:
            return
        if vllm_config.device_config.device_type != "cpu":
            raise ValueError("elastic_kv_config memory_budget is for a CPU; elsewhere the device is the limit.")
        if self.policy == "on-demand":
            raise ValueError("elastic_kv_config memory_budget does not work with the policy on-demand.")
        # Engine processes verify again what was verified before.
        if vllm_config.cache_config.kv_cache_memory_bytes not in (None, self.size("start") or self._most_in_budget):
            raise ValueError("Give elastic_kv_config memory_budget and start, not --kv-cache-memory-bytes.")
