"""Reads a llama model out of a GGUF file into the three things a Hugging Face directory is made of.

The weights come back as float32, dequantised exactly: each is a float16 scale times a small integer plus a float16
offset.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of a token that stands for no text


def unpermute(weight: Array, heads: int) -> Array:
    """Undoes the order in which llama.cpp keeps the rows of q and k.

    Rotary embedding turns pairs of a head's rows. llama.cpp keeps the rows of a pair next to each other, (0, half, 1,
    half + 1, ...), and Hugging Face keeps first all the first rows, then all the second ones.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [head, pair, which of the two, in]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


class GGUFLlama:
    """One GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        if self._field("general.architecture") != "llama":
            raise ValueError(f"{path} holds a {self._field('general.architecture')} model, not a llama")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the GGUF file does not say {name}")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        names = {tensor.name for tensor in self._reader.tensors}
        hidden, heads = self._field("llama.embedding_length"), self._field("llama.attention.head_count")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
            "dtype": "float32",
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self._field("llama.feed_forward_length"),
            "max_position_embeddings": self._field("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": heads,
            "num_hidden_layers": self._field("llama.block_count"),
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {"rope_type": "default", "rope_theta": self._field("llama.rope.freq_base")},
            "tie_word_embeddings": "output.weight" not in names,
            "vocab_size": self._field("llama.vocab_size"),
        }

    def __len__(self) -> int:
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Every weight under its Hugging Face name, in Hugging Face's order of rows."""
        heads = {
            "attn_q": self._field("llama.attention.head_count"),
            "attn_k": self._field("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            stem = tensor.name.removesuffix(".weight")
            if stem in OUTER:
                yield f"{OUTER[stem]}.weight", weight
                continue
            _, layer, kind = stem.split(".")
            if kind in heads:
                weight = np.ascontiguousarray(unpermute(weight, heads[kind]))
            yield f"model.layers.{layer}.{INNER[kind]}.weight", weight

    def tokenizer(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``tokenizer.json`` and ``tokenizer_config.json`` say."""
        model, flavour = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre")
        if (model, flavour) != ("gpt2", "smollm"):
            raise ValueError(f"the tokenizer is {model}/{flavour}; only gpt2/smollm is known here")
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        added = [
            {"id": number, "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        fast = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            # SmolLM reads every digit as a token of its own.
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": byte_level | {"add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": [pair.split(" ") for pair in self._field("tokenizer.ggml.merges")],
            },
        }

        def named(role: str) -> str:
            token: str = tokens[self._field(f"tokenizer.ggml.{role}_token_id")]
            return token

        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "pad_token": named("padding"),
            "unk_token": named("unknown"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._field("llama.context_length"),
            "chat_template": self._field("tokenizer.chat_template"),
        }
        return fast, settings
