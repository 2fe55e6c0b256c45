"""What is compiled: our kernels as the backend launches them, with and without the guard, and upstream's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from vllm.v1.attention.ops import triton_unified_attention as upstream
from vllm.v1.elastic_kv.kernels import launch
from vllm.v1.elastic_kv.kernels.formats import Format, row_bytes, views_of
from vllm.v1.elastic_kv.kernels.store import store
from vllm.v1.kv_cache_interface import KVQuantMode

ELEMENTS = {
    "bf16": (Format.NATIVE, torch.bfloat16),
    "fp16": (Format.NATIVE, torch.float16),
    "fp8_e4m3": (Format.TENSOR, torch.float8_e4m3fn),
    "fp8_e5m2": (Format.TENSOR, torch.float8_e5m2),
    "int8": (Format.TOKEN_HEAD, torch.int8),
    "int4": (Format.INT4, torch.uint8),
}
SEQS, KV_HEADS, BLOCKS, SPLITS = 4, 4, 64, 8


@dataclass(frozen=True)
class Case:
    """One kernel for one kind of batch."""

    decode: bool
    head_size: int = 128
    block_size: int = 16
    group: int = 4
    cache: str = "bf16"
    feature: str = ""  # or "window", "soft cap", "sinks", "ALiBi"

    def __str__(self) -> str:
        kind = "decode" if self.decode else "prefill"
        name = f"{kind} D{self.head_size} block {self.block_size} group {self.group} {self.cache}"
        return f"{name} {self.feature}".rstrip()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.cache == "fp16" else torch.bfloat16

    def compiles_for(self, target: str) -> bool:
        """sm_80 has no e4m3, and gfx942 another one; vLLM refuses or replaces it there."""
        return self.cache != "fp8_e4m3" or target not in ("sm_80", "gfx942")


def cases() -> list[Case]:
    """Each dimension is varied around the most usual configuration, and formats also with large heads."""
    found = []
    for decode in (True, False):
        found += [Case(decode, head_size) for head_size in (64, 80, 96, 128, 192, 256)]
        found += [Case(decode, block_size=size) for size in (32, 64, 128, 256)]
        found += [Case(decode, group=group) for group in (1, 7, 8, 16)]
        found += [Case(decode, cache=cache) for cache in ELEMENTS if cache != "bf16"]
        found += [Case(decode, 256, cache=cache) for cache in ("fp8_e5m2", "int8", "int4")]
        found += [Case(decode, feature=feature) for feature in ("window", "soft cap", "sinks", "ALiBi")]
    return found


def tiles_of(case: Case) -> launch.Tiles:
    """The default tiles, on the target that is compiled for."""
    target = triton.runtime.driver.active.get_current_target()
    capability = target.arch if target.backend == "cuda" else 0
    quantised = ELEMENTS[case.cache][0] is not Format.NATIVE
    return launch.tiles_for(case.head_size, case.group, 2, quantised, case.decode, capability)


def _tensors(case: Case) -> dict[str, torch.Tensor]:
    queries = 1 if case.decode else 64
    heads = KV_HEADS * case.group
    return {
        "q": torch.empty(SEQS * queries, heads, case.head_size, dtype=case.dtype),
        "out": torch.empty(SEQS * queries, heads, case.head_size, dtype=case.dtype),
        "table": torch.zeros(SEQS, 64, dtype=torch.int32),
        "seq_lens": torch.full((SEQS,), 64, dtype=torch.int32),
        "query_start": torch.arange(0, SEQS * queries + 1, queries, dtype=torch.int32),
        "sinks": torch.zeros(heads, dtype=case.dtype),
        "slopes": torch.zeros(heads),
        "one": torch.ones(1),
    }


def ours(case: Case, guarded: bool = True) -> None:
    """Launch our kernels as the backend does."""
    t = _tensors(case)
    format, element = ELEMENTS[case.cache]
    content = 2 * row_bytes(format, case.head_size, element)
    cache = torch.empty(BLOCKS, KV_HEADS, case.block_size, content, dtype=torch.int8)
    views = views_of(cache, format, case.head_size, element)
    resident = torch.ones(BLOCKS, dtype=torch.uint8)
    features = launch.Features(
        window=128 if case.feature == "window" else 0,
        soft_cap=30.0 if case.feature == "soft cap" else 0.0,
        sinks=t["sinks"] if case.feature == "sinks" else None,
        slopes=t["slopes"] if case.feature == "ALiBi" else None,
    )
    launch.paged_attention(
        t["q"],
        views,
        t["out"],
        t["table"],
        t["seq_lens"],
        t["query_start"],
        1 if case.decode else 64,
        0.1,
        launch.Guard(resident, torch.zeros(SEQS, dtype=torch.int32)) if guarded else None,
        features=features,
        tensor_scales=(t["one"], t["one"]),
        splits=SPLITS,
        scratch=launch.Scratch.make(SEQS * KV_HEADS * case.group * SPLITS, case.head_size, t["q"].device),
        tiles=tiles_of(case),
    )
    if guarded and case.decode:
        keys = torch.empty(SEQS, KV_HEADS, case.head_size, dtype=case.dtype)
        store(keys, keys, views, torch.zeros(SEQS, dtype=torch.int64), resident, (t["one"], t["one"]))


def upstreams(case: Case) -> None:
    """Launch upstream's kernel as its backend TRITON_ATTN does. It has no int4 in this kernel."""
    t = _tensors(case)
    format, element = ELEMENTS[case.cache]
    heads = KV_HEADS * case.group
    k = torch.empty(BLOCKS, case.block_size, KV_HEADS, case.head_size, dtype=torch.int8).to(element)
    padded = 1 << (case.head_size - 1).bit_length()
    segments = {
        "softmax_segm_output": torch.empty(SEQS, heads, 16, padded),
        "softmax_segm_max": torch.empty(SEQS, heads, 16),
        "softmax_segm_expsum": torch.empty(SEQS, heads, 16),
    }
    scales = torch.empty(BLOCKS, case.block_size, KV_HEADS)
    mode = {Format.NATIVE: KVQuantMode.NONE, Format.TENSOR: KVQuantMode.FP8_PER_TENSOR}
    options: dict[str, Any] = dict(
        q=t["q"],
        k=k,
        v=k,
        out=t["out"],
        cu_seqlens_q=t["query_start"],
        max_seqlen_q=1 if case.decode else 64,
        seqused_k=t["seq_lens"],
        max_seqlen_k=1024,
        softmax_scale=0.1,
        causal=True,
        window_size=(127, 0) if case.feature == "window" else (-1, -1),
        block_table=t["table"],
        softcap=30.0 if case.feature == "soft cap" else 0,
        q_descale=None,
        k_descale=t["one"],
        v_descale=t["one"],
        seq_threshold_3D=64,
        num_par_softmax_segments=16,
        alibi_slopes=t["slopes"] if case.feature == "ALiBi" else None,
        sinks=t["sinks"] if case.feature == "sinks" else None,
        kv_quant_mode=mode.get(format, KVQuantMode.INT8_PER_TOKEN_HEAD),
        k_scale_cache=scales,
        v_scale_cache=scales,
        **segments,
    )
    upstream.unified_attention(**options)


LAUNCHES: dict[str, Callable[[Case], None]] = {
    "ours": ours,
    "unguarded": lambda case: ours(case, guarded=False),
    "upstream": upstreams,
}
