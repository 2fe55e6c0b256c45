"""How checkpoints store their weights, from the fields that Hugging Face configs have."""

import pytest
from elastic_tools.planner.checkpoint import load_model, parse
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.memory import weight_bytes
from elastic_tools.planner.quantization import of_config

# Two layers of one KV head: 10 outputs of qkv x 8, o 8 x 8, gate and up 32 x 8, down 8 x 16: 80 + 64 + 256 + 128.
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
REST = (64 * 8 + 5 * 8) * 2  # embedding and five norms, in 16 bit
QKV, OUT, MLP = (4 + 2) * 2 * 8, 8 * 8, 3 * 16 * 8  # weights of a layer


def weights(quantization, **fields):
    return weight_bytes(parse("m", SMALL | fields | {"quantization_config": quantization}))


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 8}, 4 + 20 / 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": 8}, 8 + 24 / 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "fp8"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 8, "symmetric": True}}},
            },
            4 + 16 / 8,
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8}}}}, 8),
    ],
)
def test_bits_of_each_method(quantization, bits):
    assert of_config("m", quantization).stored == pytest.approx(bits)
    assert weights(quantization) == REST + round(2 * (QKV + OUT + MLP) * bits / 8)


@pytest.mark.parametrize(
    ("pattern", "in_16_bit"),
    [
        ("self_attn", 2 * (QKV + OUT)),
        ("model.layers.0.mlp.down_proj", 16 * 8),
        ("model.layers.1", QKV + OUT + MLP),
        ("model.layers.*.self_attn", 2 * (QKV + OUT)),
        ("re:.*o_proj", 2 * OUT),
        ("lm_head", 0),
        ("model.layers.10", 0),
    ],
)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignore"])
def test_modules_that_are_left_alone(field, pattern, in_16_bit):
    linear = 2 * (QKV + OUT + MLP)
    assert weights({"quant_method": "fp8", field: [pattern]}) == REST + linear + in_16_bit


def test_mxfp4_quantises_experts_only():
    """gpt-oss: attention, router and embedding in 16 bit, experts in 4 bits and a scale of 8 for 32 weights."""
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    plain = REST + 2 * 2 * (QKV + OUT + 4 * 8)
    assert weights({"quant_method": "mxfp4"}, **moe) == plain + round(2 * 4 * MLP * 4.25 / 8)


@pytest.mark.parametrize(
    ("fields", "with_experts"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, [1, 2, 3, 4]),
        ({"interleave_moe_layer_step": 3}, [2, 5]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
    ],
)
def test_which_layers_have_experts(fields, with_experts):
    model = parse("m", SMALL | {"num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2} | fields)
    assert [layer for layer in range(6) if model.has_experts(layer)] == with_experts


def test_a_dense_layer_between_experts_has_a_whole_mlp():
    """Layer 0 dense with 16, layer 1 four experts of 4."""
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [0]}
    model = parse("m", SMALL | fields)
    assert model.parameters == REST // 2 + 2 * (QKV + OUT) + MLP + 4 * 8 + 4 * 3 * 4 * 8


def test_scales_of_4_bit_weights_must_not_be_cut():
    """Qwen2.5-14B: 13,824 inputs of the down projection; an eighth is 1,728, no multiple of 128. vLLM refuses it."""
    model = load_model("Qwen2.5-14B", "int4")
    assert model.tp_problem(2) is None
    with pytest.raises(PlanError, match="the 1728 inputs that a rank has of 'down' are no multiple of the 128 weights"):
        model.check_tp(8)


def test_a_model_in_float32_is_served_in_16_bit():
    assert weight_bytes(parse("m", SMALL | {"torch_dtype": "float32"})) == REST + 2 * 2 * (QKV + OUT + MLP)


def test_weights_that_are_said_need_no_known_method():
    model = parse("m", SMALL | {"quantization_config": {"quant_method": "squeeze"}}, "fp8")
    assert weight_bytes(model) == REST + 2 * (QKV + OUT + MLP)


def test_nvfp4():
    assert of_config("m", {"quant_method": "modelopt", "quant_algo": "NVFP4"}).stored == 4.5


def test_scales_that_fit_no_size_at_all():
    with pytest.raises(PlanError, match="cannot run at any tensor parallel size: at 1, the 8 inputs"):
        weights({"quant_method": "awq", "bits": 4, "group_size": 128})


def test_mixed_widths_are_refused():
    groups = {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}
    with pytest.raises(PlanError, match="mixes weights"):
        of_config("m", {"quant_method": "compressed-tensors", "config_groups": groups})
