"""Memory by hand: KV bytes, blocks, weights, reserve. Every expected number is worked out in the test."""

from dataclasses import replace

import pytest
from elastic_tools.planner.cache import cache_dtype, kv_layout
from elastic_tools.planner.checkpoint import load_model, parse
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.memory import activations, budget, weight_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("dtype", "tp", "expected"),
    [
        ("bf16", 1, 32 * 8 * 128 * 2 * 2),  # layers, KV heads, head size, key and value, bytes: 131,072
        ("fp8", 1, 32 * 8 * 128 * 2),
        ("int8", 1, 32 * 8 * (128 * 2 + 8)),  # two float32 scales a token and head
        ("int4", 1, 32 * 8 * (128 + 8)),
        ("bf16", 8, 32 * 1 * 128 * 2 * 2),
        ("bf16", 16, 32 * 1 * 128 * 2 * 2),  # 16 ranks, 8 KV heads: each head is on two ranks
        # two layers at either end stay in 16 bit; 3-bit key and value with a norm, a scale and a zero point: 102 bytes
        ("3bit", 1, 8 * (28 * 102 + 4 * 512)),
    ],
)
def test_llama_3_1_8b_bytes_per_token(dtype, tp, expected):
    assert kv_layout(load_model("Llama-3.1-8B"), cache_dtype(dtype), tp).bytes_per_token == expected


def test_llama_3_1_8b_in_bf16_is_131072_bytes_a_token():
    assert kv_layout(load_model("Llama-3.1-8B"), cache_dtype("bf16")).bytes_per_token == 131_072


def test_blocks_on_an_h100():
    """79.22 GiB x 0.92 are 78,256,881,113 bytes. Of them 2 x 8,030,261,248 are weights.

    The reserve is 2 x 8,192 x 4,096 x 2 = 134,217,728 for the residual stream, and the sampler's 1,024 x 128,256 x 10 =
    1,313,341,440, since 8,192 x 3 x 14,336 x 2 = 704,643,072 of the MLP is less. Graphs take 0.25 GiB and 32 x 9 MiB,
    the framework 0.25 GiB.
    """
    found = budget(load_model("Llama-3.1-8B"), gpu("H100"), cache_dtype("bf16"), chunk=8192, sequences=1024)
    assert found.requested == 78_256_881_113
    assert found.weights == 16_060_522_496
    assert found.reserve.total == 1_447_559_168
    assert (found.graphs, found.framework) == (570_425_344, 268_435_456)
    assert found.cache == 59_909_938_649
    assert found.blocks == 28_567  # of 16 x 131,072 bytes
    assert found.request_blocks(1000) == 63
    assert found.tokens(1000) == 453_444  # 28,567 / 63 requests


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
        ("Llama-2-7B", 6_738_415_616),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Gemma-2-9B", 9_241_705_984),
        ("DeepSeek-V2-Lite", 15_706_484_224),
    ],
)
def test_parameters_are_the_published_ones(preset, parameters):
    assert load_model(preset).parameters == parameters


def test_tensor_parallel_3_is_refused_with_the_reason():
    with pytest.raises(PlanError, match="size 3: 32 attention heads cannot be divided by it; the nearest is 2"):
        weight_bytes(load_model("Llama-3.1-8B"), 3)


def test_weights_are_split_but_norms_are_not():
    model = load_model("Llama-3.1-8B")
    norms = (2 * 32 + 1) * 4096 * 2
    assert weight_bytes(model, 2) == (weight_bytes(model) - norms) // 2 + norms


def test_replicated_kv_heads_are_weights_too():
    model = load_model("Llama-3.1-8B")
    norms = (2 * 32 + 1) * 4096 * 2
    kv = 32 * 2 * 8 * 128 * 4096 * 2  # key and value projections of all layers; at 16 ranks each has an eighth
    assert weight_bytes(model, 16) == (weight_bytes(model) - norms - kv) // 16 + norms + kv // 8


def test_quantised_weights_leave_the_embedding_alone():
    model = load_model("Llama-3.1-8B")
    rest = 2 * (2 * 128_256 * 4096 + (2 * 32 + 1) * 4096)
    linear = model.parameters - rest // 2
    assert weight_bytes(model.with_weights("int8")) == rest + linear
    assert weight_bytes(model.with_weights("int4")) == pytest.approx(rest + linear * (4 + 20 / 128) / 8, abs=1)


def test_a_tied_head_is_counted_once():
    model = load_model("SmolLM2-135M")
    assert model.tied
    assert weight_bytes(replace(model, tied=False)) - weight_bytes(model) == 2 * 49_152 * 576


def test_mla_keeps_one_latent_on_every_rank():
    model = load_model("DeepSeek-V2-Lite")
    for tp in (1, 2, 4):
        assert kv_layout(model, cache_dtype("bf16"), tp, 64).bytes_per_token == 27 * (512 + 64) * 2
    assert kv_layout(model, cache_dtype("fp8"), 1, 64).bytes_per_token == 27 * (512 + 64)


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_per_token_head", "int8", "int4", "nvfp4", "3bit"])
def test_formats_that_no_latent_has(name):
    with pytest.raises(PlanError, match=r"MLA, for which vLLM has no|compute capability"):
        budget(load_model("DeepSeek-V2-Lite"), gpu("H100"), cache_dtype(name))


def test_an_fp8_latent_needs_a_gpu_with_fp8():
    with pytest.raises(PlanError, match=r"needs compute capability 8.9; the nearest is auto"):
        budget(load_model("DeepSeek-V2-Lite"), gpu("A100"), cache_dtype("fp8"))


def test_a_sliding_window_ends_the_growth_of_a_request():
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    model = parse("m", config | {"intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096})
    layout = kv_layout(model, cache_dtype("bf16"))
    assert layout.request_blocks(32_768, 1) == 256 + 1  # the window, which may begin inside a block
    assert layout.request_blocks(131_072, 1) == 256 + 1
    # with 4,096 tokens scheduled: 4,095 + 4,096 are 8,191 tokens, 512 blocks, and one more
    assert layout.request_blocks(32_768, 4096) == 512 + 1
    assert layout.request_blocks(4_000, 4096) == 250 + 1  # no more than the request has


def test_a_hybrid_has_a_group_for_each_kind():
    model = load_model("Gemma-2-9B")  # 42 layers: every other one looks at 4,096 tokens only
    layout = kv_layout(model, cache_dtype("bf16"))
    assert layout.groups == ((0, 1), (4096, 1))
    assert layout.bytes_per_block == 16 * 21 * 8 * 256 * 2 * 2
    assert layout.request_blocks(8192, 1) == 512 + 256 + 1
    # vLLM schedules two steps of 2,048 tokens before the first is done, so a window keeps 4,095 + 4,096 tokens
    assert budget(model, gpu("L40S"), cache_dtype("bf16")).request_blocks(8192) == 512 + 512 + 1


def test_the_reserve_melts_under_tensor_parallelism_but_the_residual_does_not():
    model = load_model("Llama-3.1-8B")
    whole, split = activations(model, 8192, 1, 1), activations(model, 8192, 8, 1)
    assert split.wide * 8 == whole.wide
    assert split.hidden == whole.hidden


def test_the_widest_moment_of_a_layer():
    """Qwen3-8B: the MLP keeps 3 x 12,288 elements of 2 bytes for a token, and the residual stream 2 x 4,096: 90,112
    bytes. vLLM pull request 48322 measured 89,856, between steps of 2,048 and of 8,192 tokens.
    """
    model = load_model("Qwen3-8B")
    found = activations(model, 8192, 1, 256)
    assert (found.hidden, found.wide) == (8192 * 16_384, 8192 * 73_728)
    assert (found.hidden + found.wide) / 8192 == pytest.approx(89_856, rel=0.003)
    # the sampler: 256 rows of 151,936 logits, 10 bytes each
    assert activations(model, 2048, 1, 256).total == 2048 * 16_384 + 256 * 151_936 * 10


def test_weights_that_do_not_fit_leave_a_negative_cache():
    found = budget(load_model("Llama-3.1-70B"), gpu("H100"), cache_dtype("bf16"))
    assert found.cache < 0
    assert found.blocks == 0
