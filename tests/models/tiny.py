"""Tiny models of random weights with SmolLM2's tokenizer: one for each way in which layers use the KV cache."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from support.servers import smollm2

LAYERS = {"num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 1024}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 32,
}
SHARED = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 49152, "hidden_size_per_layer_input": 16}

# Name: the family in transformers, and what its configuration has beside the common sizes.
MODELS: dict[str, tuple[str, dict]] = {
    "full": ("Llama", LAYERS | ATTENTION),
    "window": ("Mistral", LAYERS | ATTENTION | {"sliding_window": 64}),
    "interleaved": ("Gemma3", LAYERS | ATTENTION | WINDOWS),
    "shared": ("Gemma3n", LAYERS | ATTENTION | WINDOWS | SHARED | {"activation_sparsity_pattern": [0.0] * 4}),
    "sizes": ("Gemma4", LAYERS | ATTENTION | WINDOWS | SHARED | {"global_head_dim": 64}),
    "mla": (
        "DeepseekV2",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 1024,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            # What the CPU's decode kernel is compiled for.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 2,  # dense layers only
            "tie_word_embeddings": False,
            # As DeepSeek's models have it. Plain rotary embedding is wrong in the CPU's kernel for MLA, which takes the
            # rotary part of a query for a whole one.
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "mamba": ("Mamba2", {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}),
    "hybrid": (
        "FalconH1",
        LAYERS | ATTENTION | {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    ),
}


def tiny(name: str, folder: Path) -> str:
    """The directory of a model, made if it is not there. The same name gives the same weights."""
    path = folder / name
    if path.exists():
        return str(path)
    family, sizes = MODELS[name]
    text = "Text" if f"{family}TextConfig" in dir(transformers) else ""
    tokens = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    common = {"hidden_size": 64, "tie_word_embeddings": True, "initializer_range": 0.3}
    config = getattr(transformers, f"{family}{text}Config")(**tokens | common | sizes)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).float().save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(smollm2()) / file, path / file)
    return str(path)


def adapter(name: str, folder: Path, seed: int, rank: int = 8) -> str:
    """The directory of a LoRA adapter for the model called `full`, as PEFT writes it."""
    path = folder / name
    path.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    outputs = {"q_proj": 64, "v_proj": 32}
    tensors = {}
    for layer in range(LAYERS["num_hidden_layers"]):
        for module, rows in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{at}.lora_A.weight"] = random.standard_normal((rank, 64), dtype=np.float32) / 8
            tensors[f"{at}.lora_B.weight"] = random.standard_normal((rows, rank), dtype=np.float32) / 8
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(outputs), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return str(path)
