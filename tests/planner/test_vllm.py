"""The planner's cache is vLLM's: page sizes from vLLM's own specs and backends, groups from vLLM's own allocator."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from elastic_tools.planner.cache import DTYPES, kv_layout, layer_token_bytes
from elastic_tools.planner.checkpoint import load_model
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, nvfp4_kv_cache_full_dim
from vllm.v1.attention.ops.ultraquant.format import slot_size
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
    # Two backends cannot be imported without a GPU; the sizes that they publish come from these functions of vLLM.
    without_gpu = {"nvfp4": lambda d: 2 * nvfp4_kv_cache_full_dim(d), "ultraquant_4bit": slot_size}
    if name in without_gpu:
        return SimpleNamespace(page_size_bytes=block * model.kv_heads_on(tp) * without_gpu[name](model.head_dim))
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


@pytest.mark.parametrize("tp", [1, 4, 16])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", DTYPES)
def test_a_block_has_vllms_bytes(name, block, tp):
    model = load_model("Llama-3.1-8B")
    skip = DTYPES[name].skip
    compressed, plain = spec(name, model, tp, block), spec("auto", model, tp, block)
    expected = (model.layers - 2 * skip) * compressed.page_size_bytes + 2 * skip * plain.page_size_bytes
    assert kv_layout(model, DTYPES[name], tp, block).bytes_per_block == expected


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", DTYPES)
def test_every_head_size_has_vllms_bytes(name, dim):
    model = replace(load_model("Llama-3.1-8B"), head_dim=dim)
    assert layer_token_bytes(model, DTYPES[name], 1, model.layers // 2) * 16 == spec(name, model, 1, 16).page_size_bytes


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.latent or dtype.content is None])
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
