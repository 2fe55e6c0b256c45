"""The kernels that the benchmark compares, on a GPU. Each has the same keys and values, in its own layout."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.elastic_kv.kernels.formats import Format, row_bytes, views_of
from vllm.v1.elastic_kv.kernels.launch import Guard, Scratch, paged_attention, splits_for
from vllm.v1.elastic_kv.kernels.store import store
from vllm.v1.kv_cache_interface import KVQuantMode

from elastic_tools.kernels.bench import OURS, Point
from elastic_tools.kernels.cases import ELEMENTS

# How far an output may be from that of our kernel over the same values in bf16, of its norm; between two caches
# of one format it is the order of sums alone.
ERROR = {"bf16": 0.02, "fp8_e4m3": 0.1, "int8": 0.05, "int4": 0.3}
FLUSHED = 256 << 20  # bytes, more than the second-level cache of any GPU


class _Batch:
    """Queries, keys and values, and a table whose blocks lie in any order."""

    def __init__(self, point: Point) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        per_seq = -(-point.context // point.block_size)
        self.point, self.blocks = point, point.batch * per_seq
        self.scale = point.head_size**-0.5
        self.q = torch.randn(point.batch, point.q_heads, point.head_size, **options)
        # [blocks, block_size, kv_heads, head_size], as the other kernels have it
        self.k, self.v = (
            torch.randn(self.blocks, point.block_size, point.kv_heads, point.head_size, **options) for _ in range(2)
        )
        self.table = torch.randperm(self.blocks, device="cuda").int().view(point.batch, per_seq)
        self.lengths = torch.full((point.batch,), point.context, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(point.batch + 1, dtype=torch.int32, device="cuda")
        self.one = torch.ones(1, device="cuda")

    def ours(self, cache: str) -> Callable[[], torch.Tensor]:
        p = self.point
        format, element = ELEMENTS[cache]
        content = 2 * row_bytes(format, p.head_size, element)
        raw = torch.empty(self.blocks, p.kv_heads, p.block_size, content, dtype=torch.int8, device="cuda")
        views = views_of(raw, format, p.head_size, element)
        resident = torch.ones(self.blocks, dtype=torch.uint8, device="cuda")
        slots = torch.arange(self.blocks * p.block_size, device="cuda")
        store(self.k.flatten(0, 1), self.v.flatten(0, 1), views, slots, resident, (self.one, self.one))
        out = torch.empty_like(self.q)
        units = torch.cuda.get_device_properties(0).multi_processor_count
        splits = splits_for(p.batch * p.kv_heads, units)
        scratch = Scratch.make(p.batch * p.q_heads * splits, p.head_size, self.q.device)
        guard = Guard(resident, torch.zeros(p.batch, dtype=torch.int32, device="cuda"))

        def call() -> torch.Tensor:
            paged_attention(
                self.q,
                views,
                out,
                self.table,
                self.lengths,
                self.starts,
                1,
                self.scale,
                guard,
                tensor_scales=(self.one, self.one),
                splits=splits,
                scratch=scratch,
            )
            return out

        return call

    def _elements(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and their scales, [blocks, block_size, kv_heads], as upstream's kernel takes them."""
        format, element = ELEMENTS[self.point.cache]
        if format is not Format.TOKEN_HEAD:
            return self.k.to(element), self.v.to(element), self.one, self.one
        scales = [x.float().abs().amax(-1) / 127 for x in (self.k, self.v)]
        k, v = ((x / s[..., None]).round().to(element) for x, s in zip((self.k, self.v), scales, strict=True))
        return k, v, scales[0], scales[1]

    def upstreams(self) -> Callable[[], torch.Tensor]:
        p = self.point
        format, _ = ELEMENTS[p.cache]
        if format is Format.INT4:
            raise NotImplementedError("no int4 in this kernel")
        k, v, k_scales, v_scales = self._elements()
        out = torch.empty_like(self.q)
        modes = {Format.NATIVE: KVQuantMode.NONE, Format.TENSOR: KVQuantMode.FP8_PER_TENSOR}
        parts = torch.empty(p.batch, p.q_heads, 16, p.head_size, device="cuda")
        top, total = torch.empty(2, p.batch, p.q_heads, 16, device="cuda")

        def call() -> torch.Tensor:
            unified_attention(
                q=self.q,
                k=k,
                v=v,
                out=out,
                cu_seqlens_q=self.starts,
                max_seqlen_q=1,
                seqused_k=self.lengths,
                max_seqlen_k=p.context,
                softmax_scale=self.scale,
                causal=True,
                window_size=(-1, -1),
                block_table=self.table,
                softcap=0,
                q_descale=None,
                k_descale=self.one,
                v_descale=self.one,
                # As TRITON_ATTN has it: splits for batches that do not fill the device.
                seq_threshold_3D=128 // p.kv_heads,
                num_par_softmax_segments=16,
                softmax_segm_output=parts,
                softmax_segm_max=top,
                softmax_segm_expsum=total,
                kv_quant_mode=modes.get(format, KVQuantMode.INT8_PER_TOKEN_HEAD),
                k_scale_cache=k_scales,
                v_scale_cache=v_scales,
            )
            return out

        return call

    def flash_attention(self) -> Callable[[], torch.Tensor]:
        if self.point.cache != "bf16":
            raise NotImplementedError("bf16 only in this benchmark")
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        options: dict[str, Any] = dict(max_seqlen_q=1, cu_seqlens_q=self.starts, causal=True)
        options |= dict(max_seqlen_k=self.point.context, seqused_k=self.lengths, block_table=self.table)
        return lambda: flash_attn_varlen_func(self.q, self.k, self.v, softmax_scale=self.scale, **options)

    def flashinfer(self) -> Callable[[], torch.Tensor]:
        p = self.point
        if p.cache != "bf16":
            raise NotImplementedError("bf16 only in this benchmark")
        import flashinfer

        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        per_seq = self.table.shape[1]
        decode.plan(
            self.starts * per_seq,
            self.table.flatten(),
            (self.lengths - 1) % p.block_size + 1,
            p.q_heads,
            p.kv_heads,
            p.head_size,
            p.block_size,
            q_data_type=self.q.dtype,
            kv_data_type=self.k.dtype,
        )
        return lambda: decode.run(self.q, (self.k, self.v))


def _timed(call: Callable[[], Any]) -> Callable[[], float]:
    """Captures a call in a graph, so that only the device's time counts. Seconds of a replay, with cold caches."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flushed = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed() -> float:
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1e3
        return seconds

    return timed


def arms(point: Point) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """What can be timed at a point, and what cannot, with the reason.

    Raises:
        AssertionError: A kernel computes something else.

    """
    batch = _Batch(point)
    exact = batch.ours("bf16")().float()
    made: dict[str, Callable[[], float]] = {}
    absent: dict[str, str] = {}
    others = {"TRITON_ATTN": batch.upstreams, "FlashAttention": batch.flash_attention, "FlashInfer": batch.flashinfer}
    for name, make in {OURS: lambda: batch.ours(point.cache), **others}.items():
        try:
            call = make()
            out = call().float()
        # What is not installed or not made for this GPU says so in many ways.
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        error_norm = float((out - exact).norm() / exact.norm())
        assert error_norm < ERROR[point.cache], f"{name} is wrong by {error_norm:.3f} at {point}"
        made[name] = _timed(call)
    return made, absent


def bandwidth(rounds: int) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = _timed(lambda: target.copy_(source))
    return 2 * source.numel() / median(copy() for _ in range(rounds))
