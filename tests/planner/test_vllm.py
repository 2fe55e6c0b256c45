"""The planner's cache is vLLM's: page sizes from vLLM's own specs and backends, groups from vLLM's own allocator."""

import importlib
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from elastic_tools.planner.cache import (
    ALIASES,
    DTYPES,
    IN_FLIGHT,
    MLA_FP8_BLOCK,
    REFUSED,
    KVLayout,
    block_tokens,
    kv_layout,
    layer_token_bytes,
)
from elastic_tools.planner.checkpoint import load_model
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, nvfp4_kv_cache_full_dim
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

GIB = 2**30
ATTENTION = "vllm.v1.attention.backends"
# Which backend packs a format; vLLM's own registry chooses it by what the platform has.
BACKENDS = {
    "turboquant": (f"{ATTENTION}.turboquant_attn", "TurboQuantAttentionBackend"),
    "": (f"{ATTENTION}.triton_attn", "TritonAttentionBackend"),
}
CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    ),
    attention_config=SimpleNamespace(hisparse_config=None),
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    speculative_config=None,
    kv_transfer_config=None,
)
LATENT = ("vllm.model_executor.layers.attention.mla_attention", "MLACommonBackend")


def backend(name, latent=False):
    """vLLM's class that lays out a cache dtype, or a skip where this platform cannot import it."""
    key = next(key for key in BACKENDS if name.startswith(key))
    module, cls = LATENT if latent else BACKENDS[key]
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        pytest.skip(f"{cls} cannot be imported here: {error}")


def torch_dtype(name):
    return kv_cache_dtype_str_to_dtype(name, SimpleNamespace(dtype=torch.bfloat16))


def spec(name, model, tp, block, window=0):
    """One layer's page as vLLM describes it."""
    # This backend cannot be imported without a GPU; the size that it publishes comes from this function of vLLM.
    if name == "nvfp4":
        size = 2 * nvfp4_kv_cache_full_dim(model.head_dim)
        return SimpleNamespace(page_size_bytes=block * model.kv_heads_on(tp) * size)
    fields = {
        "block_size": block,
        "num_kv_heads": model.kv_heads_on(tp),
        "head_size": model.head_dim,
        "dtype": torch_dtype(name),
        "kv_quant_mode": get_kv_quant_mode(name),
    }
    cls = backend(name)
    return cls.customize_spec(
        SlidingWindowSpec(**fields, sliding_window=window) if window else FullAttentionSpec(**fields)
    )


def aligned_block(name, model, tp):
    """The tokens of a block that vLLM's platform sets when some layers keep the 16-bit type. The first layers do, so
    it asks their backend; FlashAttention, which it takes on a GPU, describes a page as the Triton backend does.
    """
    cache = SimpleNamespace(
        kv_cache_dtype_skip_layers=["0"],
        cache_dtype=name,
        block_size=16,
        mamba_page_size_padded=None,
        skip_page_size_padded=None,
    )
    shapes = SimpleNamespace(
        get_num_kv_heads=lambda _: model.kv_heads_on(tp), get_head_size=lambda: model.head_dim, dtype=torch.bfloat16
    )
    config = SimpleNamespace(cache_config=cache, model_config=shapes, parallel_config=None)
    with patch("vllm.config.vllm.set_current_vllm_config"):
        Platform._align_heterogeneous_kv_block_size(config, backend("auto"))
    return cache.block_size


def test_every_cache_dtype_of_vllm_is_known_or_refused_by_name():
    names = set(get_args(CacheDType))
    assert names <= {*DTYPES, *ALIASES, *REFUSED}
    assert {*DTYPES, *REFUSED} <= names


@pytest.mark.parametrize("tp", [1, 4, 16])
@pytest.mark.parametrize("preset", ["Llama-3.1-8B", "SmolLM2-135M"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_block_has_vllms_bytes(name, preset, tp):
    model = load_model(preset)
    if model.tp_problem(tp):
        tp = 1
    packed = name.startswith("turboquant")
    block = aligned_block(name, model, tp) if packed else 16
    assert block_tokens(model, DTYPES[name], 90) == block
    dense = SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace(num_hidden_layers=model.layers))
    plain = TurboQuantConfig.get_boundary_skip_layers(dense) if packed else []
    pages = [
        spec("auto" if str(layer) in plain else name, model, tp, block).page_size_bytes for layer in range(model.layers)
    ]
    assert kv_layout(model, DTYPES[name], tp, block).bytes_per_block == sum(pages)


MLA_BACKENDS = ("flashmla", "flashattn_mla", "flashinfer_mla", "triton_mla", "cutlass_mla", "tokenspeed_mla")


def test_latent_formats_are_those_of_vllms_dense_mla_backends():
    """Read from the sources, since most of these modules import on a GPU only."""
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "v1/attention/backends/mla"
    found = set()
    for module in MLA_BACKENDS:
        text = (folder / f"{module}.py").read_text()
        found |= set(
            re.findall(r'"(\w+)"', re.search(r"supported_kv_cache_dtypes[^\[]*\[.*?= \[(.*?)\]", text, re.S)[1])
        )
    assert {name for name, dtype in DTYPES.items() if dtype.latent} == found & set(DTYPES)
    assert "return [64]" in (folder / "flashmla.py").read_text()  # the block of an FP8 latent on Hopper
    assert MLA_FP8_BLOCK == 64


def test_requests_of_a_window_take_vllms_blocks():
    window, block = 4096, 16
    full = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    sliding = SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=window
    )
    layout = KVLayout(block, 1, ((0, 1), (window, 2)), 1)
    for chunk in (256, 2048, 8192):
        for length in (16, 1000, 4096, 5000, 8192, 131_072):
            config = SimpleNamespace(
                max_in_flight_tokens=IN_FLIGHT * chunk,
                model_config=SimpleNamespace(max_model_len=length),
                parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
            )
            blocks = full.max_memory_usage_bytes(config) // full.page_size_bytes
            blocks += 2 * (sliding.max_memory_usage_bytes(config) // sliding.page_size_bytes)
            assert layout.request_blocks(length, IN_FLIGHT * chunk) == blocks


def test_steps_in_flight_are_vllms():
    async_engine = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        use_v2_model_runner=True,
    )
    assert VllmConfig.max_concurrent_batches.fget(async_engine) == IN_FLIGHT


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", DTYPES)
def test_every_head_size_has_vllms_bytes(name, dim):
    model = replace(load_model("Llama-3.1-8B"), head_dim=dim)
    assert layer_token_bytes(model, DTYPES[name], 1, model.layers // 2) * 16 == spec(name, model, 1, 16).page_size_bytes


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.latent])
def test_a_latent_has_vllms_bytes(name):
    model = load_model("DeepSeek-V2-Lite")
    page = backend(name, latent=True).customize_spec(
        MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=model.mla.kv_rank + model.mla.rope,
            dtype=torch_dtype(name),
            kv_quant_mode=get_kv_quant_mode(name),
            cache_dtype_str=name,
        )
    )
    assert kv_layout(model, DTYPES[name], 2, 64).bytes_per_block == model.layers * page.page_size_bytes


@pytest.mark.parametrize("name", ["auto", "fp8", "int4_per_token_head"])
@pytest.mark.parametrize("preset", ["Gemma-2-9B", "Gemma-2-27B", "Mistral-7B-v0.3", "Llama-3.1-8B"])
def test_the_groups_of_a_hybrid_are_vllms(preset, name):
    model = load_model(preset)
    layers = {f"layer.{n}": spec(name, model, 1, 16, window) for n, window in enumerate(model.windows)}
    groups = get_kv_cache_groups(CONFIG, layers)
    longest = max(len(group.layer_names) for group in groups)
    layout = kv_layout(model, DTYPES[name])
    assert sum(count for _, count in layout.groups) == len(groups)
    assert layout.bytes_per_block == longest * groups[0].kv_cache_spec.page_size_bytes


@pytest.mark.parametrize("name", ["auto", "fp8", "int8_per_token_head", "int4_per_token_head"])
@pytest.mark.parametrize("preset", ["Llama-3.1-8B", "Qwen2.5-7B", "Gemma-2-9B", "Mistral-7B-v0.3"])
@pytest.mark.parametrize("available", [0, 5 * GIB + 1, 60 * GIB + 12345])
def test_the_engine_makes_as_many_blocks(preset, name, available):
    model = load_model(preset)
    layers = {f"layer.{n}": spec(name, model, 1, 16, window) for n, window in enumerate(model.windows)}
    made = get_kv_cache_config_from_groups(CONFIG, get_kv_cache_groups(CONFIG, layers), available)
    assert kv_layout(model, DTYPES[name]).blocks(available) == made.num_blocks
