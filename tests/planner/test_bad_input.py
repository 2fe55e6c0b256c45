"""Input that makes no plan gets one sentence that names the value and the nearest valid choice."""

import json
import math

import pytest
from elastic_tools.planner.cache import REFUSED, cache_dtype, kv_layout
from elastic_tools.planner.checkpoint import load_model, parse
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.memory import budget
from elastic_tools.planner.workload import Lengths, Workload, parse_lengths

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}


def says(*parts):
    """The sentence of the ``PlanError``: all parts are in it, and it is one line."""

    class Says:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, _):
            assert kind is PlanError
            assert all(part in str(error) for part in parts), str(error)
            assert "\n" not in str(error)
            return True

    return Says()


def test_unknown_gpu():
    with says("'H1000'", "the nearest is H100"):
        gpu("H1000")


def test_unknown_cache_dtype():
    with says("'fp7'", "the nearest is fp"):
        cache_dtype("fp7")


def test_unknown_model():
    with says("'llama-3.1-8'", "Llama-3.1-8B"):
        load_model("llama-3.1-8")


def test_unknown_weights():
    with says("'int5'", "the nearest is int"):
        load_model("Llama-3.1-8B", "int5")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field(field):
    with says(field, "is missing"):
        parse("m", {key: value for key, value in LLAMA.items() if key != field})


FIELDS = ["hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "sliding_window"]


@pytest.mark.parametrize("value", [-1, "8", 1.5, True, [8]])
@pytest.mark.parametrize("field", [*FIELDS, "intermediate_size", "max_position_embeddings", "kv_lora_rank"])
def test_a_field_without_sense(field, value):
    with says(field, repr(value), "a whole number above 0"):
        parse("m", LLAMA | {field: value})


def test_heads_that_do_not_share_evenly():
    with says("32 attention heads", "no multiple of 5"):
        parse("m", LLAMA | {"num_key_value_heads": 5})


def test_more_active_experts_than_there_are():
    with says("visits 9 of 8"):
        parse("m", LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 9})


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_vllm_has_and_the_planner_has_not(name):
    with says(name, "the planner", "the nearest is"):
        cache_dtype(name)


def test_no_intermediate_size():
    with says("intermediate_size is missing"):
        parse("m", {key: value for key, value in LLAMA.items() if key != "intermediate_size"})


def test_a_half_config_of_mla():
    with says("qk_nope_head_dim is missing"):
        parse("m", LLAMA | {"kv_lora_rank": 512})


def test_experts_without_how_many_are_active():
    with says("num_experts_per_tok is missing"):
        parse("m", LLAMA | {"num_local_experts": 8})


def test_unknown_quantisation():
    with says("'squeeze'", "--weights"):
        parse("m", LLAMA | {"quantization_config": {"quant_method": "squeeze"}})


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": 5},
        {"model_type": 7},
        {"text_config": [1]},
        {"tie_word_embeddings": "no"},
        {"attention_bias": 1},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 10**9},
        {"hidden_size": 10**30},
        {"quantization_config": [1]},
    ],
)
def test_a_field_of_another_kind(fields):
    with says("makes no sense", *fields, "must be"):
        parse("m", LLAMA | fields)


@pytest.mark.parametrize(
    ("quantization", "part"),
    [
        ({"config_groups": [1]}, "config_groups is [1]"),
        ({"config_groups": {"a": 3}}, "a is 3"),
        ({"config_groups": {"a": {"weights": 3}}}, "weights of a is 3"),
        ({"config_groups": {"a": {"weights": {"num_bits": [4]}}}}, "num_bits is [4]"),
        ({"config_groups": {"a": {"weights": {"num_bits": -4}}}}, "num_bits is -4"),
        ({"quant_method": "awq", "bits": True}, "bits is True"),
        ({"quant_method": "fp8", "ignore": 5}, "ignore is 5"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "'re:(' in ignore is no pattern"),
    ],
)
def test_a_quantisation_without_sense(quantization, part):
    with says("The config of m", part):
        parse("m", LLAMA | {"quantization_config": quantization})


def test_one_module_left_alone_may_be_named_without_a_list():
    found = parse("m", LLAMA | {"quantization_config": {"quant_method": "fp8", "ignore": "self_attn.o_proj"}})
    assert found.weights.of(0, "o") == 16
    assert found.weights.of(0, "down") == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mamba2"},
        {"layers_block_type": ["mamba", "attention"]},
        {"attn_layer_period": 8},  # Jamba
        {"linear_conv_kernel_dim": 4},  # Qwen3-Next
        {"layer_types": ["full_attention", "chunked_attention"]},  # Llama 4
        {"layer_types": [{}]},
        {"attention_chunk_size": 8192},
        {"index_topk": 2048},  # DeepSeek-V3.2
        {"num_kv_shared_layers": 15},  # Gemma 3n
        {"text_config": {"mamba_d_state": 16}},
    ],
)
def test_layers_with_another_cache(fields):
    with says("layers of another kind", "it knows full and sliding-window attention"):
        parse("m", LLAMA | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gpt_neox", "hidden_act": "gelu"},
        {"model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh"},
        {"model_type": "bart", "is_encoder_decoder": True},
    ],
)
def test_families_of_another_shape(fields):
    with says(fields["model_type"], "it knows decoders whose MLP has a gate"):
        parse("m", LLAMA | fields)


def test_layers_of_another_kind_that_a_config_names_and_does_not_have():
    parse("m", LLAMA | {"attention_chunk_size": None, "num_kv_shared_layers": 0, "is_encoder_decoder": False})
    parse("m", LLAMA | {"model_type": "gemma", "hidden_act": "gelu"})


def test_no_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    with says(str(path), "JSON"):
        load_model(str(path))


def test_json_that_is_nested_too_deeply(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with says(str(path), "nested too deeply"):
        load_model(str(path))


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert load_model(str(path)).hidden == 4096


def test_a_folder_without_a_config(tmp_path):
    with says(str(tmp_path), "has no config.json"):
        load_model(str(tmp_path))


def test_a_list_instead_of_an_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps([1]))
    with says("no JSON object"):
        load_model(str(path))


@pytest.mark.parametrize("tp", [0, -1, 3, 5, 64])
def test_tensor_parallel_sizes(tp):
    with says(f"size {tp}:", "the nearest is"):
        load_model("Llama-3.1-8B").check_tp(tp)


def test_a_block_that_no_backend_takes():
    with says("17 tokens", "multiple of 16"):
        kv_layout(load_model("Llama-3.1-8B"), cache_dtype("bf16"), block=17)


@pytest.mark.parametrize("share", [0, -0.5, 1.5, math.nan])
def test_utilization(share):
    with says("utilization", f"{share:g}"):
        budget(load_model("Llama-3.1-8B"), gpu("H100"), cache_dtype("bf16"), utilization=share)


def test_a_format_that_the_gpu_lacks():
    with says("nvfp4", "10.0", "9.0", "int4_per_token_head"):
        budget(load_model("Llama-3.1-8B"), gpu("H100"), cache_dtype("nvfp4"))


@pytest.mark.parametrize("price", [0, -2, math.nan, math.inf])
def test_price(price):
    with says("price", f"{price:g}"):
        gpu("H100").at(price)


@pytest.mark.parametrize("field", ["rate", "concurrency", "ttft", "tpot"])
def test_negative_workloads(field):
    with says("-3", "above 0"):
        Workload(Lengths(10), Lengths(10), **{field: -3})


def test_a_rate_and_a_concurrency():
    with says("one of them"):
        Workload(Lengths(10), Lengths(10), rate=1, concurrency=1)


@pytest.mark.parametrize("text", ["", "many", "0", "-5", "10~9", "10~x", "1.5"])
def test_lengths(text):
    with says("--prompt", repr(text)):
        parse_lengths("--prompt", text)
