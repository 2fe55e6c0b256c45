# SPDX-License-Identifier: Apache-2.0
"""The attention backend ELASTIC_TRITON: paged attention that never touches a block without memory."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.elastic_kv.kernels.formats import CacheViews, Format, row_bytes, views_of
from vllm.v1.elastic_kv.kernels.launch import Features, Guard, Scratch, paged_attention, splits_for
from vllm.v1.elastic_kv.kernels.store import store
from vllm.v1.elastic_kv.residency import residency_of
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType
    from vllm.v1.attention.backend import AttentionLayer
    from vllm.v1.kv_cache_interface import AttentionSpec

logger = init_logger(__name__)

_FORMATS = {
    KVQuantMode.NONE: Format.NATIVE,
    KVQuantMode.FP8_PER_TENSOR: Format.TENSOR,
    KVQuantMode.INT8_PER_TOKEN_HEAD: Format.TOKEN_HEAD,
    KVQuantMode.FP8_PER_TOKEN_HEAD: Format.TOKEN_HEAD,
    KVQuantMode.INT4_PER_TOKEN_HEAD: Format.INT4,
}


def _element(kv_cache_dtype: str, cache: torch.Tensor) -> torch.dtype:
    if kv_cache_dtype == "fp8_e5m2":
        return torch.float8_e5m2
    if kv_cache_dtype.startswith("fp8"):
        return current_platform.fp8_dtype()
    return {"int8_per_token_head": torch.int8, "int4_per_token_head": torch.uint8}.get(kv_cache_dtype, cache.dtype)


@dataclass
class ElasticTritonMetadata(AttentionMetadata):
    """A batch. All tensors are the model runner's own, so a captured graph sees what they hold later."""

    num_actual_tokens: int
    max_query_len: int
    query_start: torch.Tensor  # int32 [seqs + 1]
    seq_lens: torch.Tensor  # int32 [seqs]
    table: torch.Tensor  # int32 [seqs, …]
    slot_mapping: torch.Tensor  # int64 [tokens]
    splits: int
    scratch: Scratch
    counting_layer: str  # the one layer whose launch counts faults: all layers of the group have the same table


def counting_layer(windows: Mapping[str, int | None]) -> str:
    """The layer that looks at most of the table, by the sliding windows of a group's layers; None: no window."""
    return max(windows, key=lambda name: windows[name] or sys.maxsize)


class ElasticTritonMetadataBuilder(AttentionMetadataBuilder[ElasticTritonMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: "AttentionSpec", layer_names: list[str], vllm_config: "VllmConfig", device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._kv_heads = kv_cache_spec.num_kv_heads
        q_heads = get_num_attention_heads_from_layers(vllm_config, layer_names) or model.get_num_attention_heads(
            parallel
        )
        # A CPU has one program at a time; two splits there, so that the reduction is run too.
        self._multiprocessors = current_platform.num_compute_units() if device.type == "cuda" else 4
        group = -(-q_heads // self._kv_heads)
        self._scratch = Scratch.make(2 * self._multiprocessors * group, kv_cache_spec.head_size, device)
        self._rows = vllm_config.scheduler_config.max_num_seqs
        context = vllm_config.compilation_config.static_forward_context
        self._layer = context[layer_names[0]]
        self._counting_layer = counting_layer({name: context[name].sliding_window for name in layer_names})

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> ElasticTritonMetadata:
        metadata = self.build(0, common_attn_metadata)
        # A capture of the longest lengths would only be slow.
        metadata.seq_lens.fill_(1)
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ElasticTritonMetadata:
        common = common_attn_metadata
        residency = residency_of(self._layer.kv_cache)
        # A draft model's steps belong to the step that they follow.
        if residency is not None and not fast_build:
            residency.count(max(self._rows, common.num_reqs)).zero_()
        return ElasticTritonMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            splits=splits_for(common.num_reqs * self._kv_heads, self._multiprocessors),
            scratch=self._scratch,
            counting_layer=self._counting_layer,
        )


class ElasticTritonBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list["CacheDType"]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int8_per_token_head",
        "fp8_per_token_head",
        "int4_per_token_head",
    ]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "ELASTIC_TRITON"

    @staticmethod
    def get_impl_cls() -> type["ElasticTritonImpl"]:
        return ElasticTritonImpl

    @staticmethod
    def get_builder_cls() -> type[ElasticTritonMetadataBuilder]:
        return ElasticTritonMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 16 <= head_size <= 256

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: "AttentionSpec") -> "AttentionSpec":
        """Room for the scales, which lie behind each value."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        format = _FORMATS[spec.kv_quant_mode]
        assert get_dtype_size(spec.dtype) == 1
        return replace(spec, state_content_bytes=2 * row_bytes(format, spec.head_size, spec.dtype))


class ElasticTritonImpl(AttentionImpl[ElasticTritonMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"ELASTIC_TRITON is for decoder attention, this layer is {attn_type}.")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._format = _FORMATS[get_kv_quant_mode(kv_cache_dtype)]
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._features = Features(sliding_window or 0, logits_soft_cap or 0.0, sinks, slopes)
        self._bound: tuple[torch.Tensor, CacheViews, Guard, Guard] | None = None

    def _bind(self, kv_cache: torch.Tensor, device: torch.device) -> tuple[CacheViews, Guard, Guard]:
        """The cache's views, the guard that counts and the one that does not; made once for each cache."""
        if self._bound is None or self._bound[0] is not kv_cache:
            views = views_of(kv_cache, self._format, self.head_size, _element(self.kv_cache_dtype, kv_cache))
            residency = residency_of(kv_cache)
            resident = None if residency is None else residency.resident
            faults = None if residency is None else residency.faults
            if self._features.slopes is not None:
                self._features = replace(self._features, slopes=self._features.slopes.to(device))
            self._bound = kv_cache, views, Guard(resident, faults), Guard(resident)
        return self._bound[1:]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: ElasticTritonMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a batch's tokens to the cache, which has their keys and values already.

        Args:
            layer: Has the scales of fp8 keys and values.
            query: `[tokens, heads, head_size]`.
            key: Not read.
            value: Not read.
            kv_cache: `[blocks, kv_heads, block_size, content]`.
            attn_metadata: The batch; None while memory is profiled.
            output: As `query`.
            output_scale: Refused.
            output_block_scale: Refused.

        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("ELASTIC_TRITON does not quantise its output.")
        if attn_metadata is None:
            return output.fill_(0)
        views, counting, silent = self._bind(kv_cache, query.device)
        tokens = attn_metadata.num_actual_tokens
        paged_attention(
            query[:tokens],
            views,
            output[:tokens],
            attn_metadata.table,
            attn_metadata.seq_lens,
            attn_metadata.query_start,
            attn_metadata.max_query_len,
            self.scale,
            counting if layer.layer_name == attn_metadata.counting_layer else silent,
            features=self._features,
            tensor_scales=(layer._k_scale, layer._v_scale),
            splits=attn_metadata.splits,
            scratch=attn_metadata.scratch,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: "AttentionLayer",
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the batch's keys and values into the cache."""
        views, _, silent = self._bind(kv_cache, key.device)
        store(key, value, views, slot_mapping, silent.resident, (layer._k_scale, layer._v_scale))
