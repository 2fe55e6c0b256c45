"""The tokenizer that is rebuilt from the GGUF metadata."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


# SmolLM2 has no token for a few control characters, nor for the planes from U+40000 on.
letters = st.characters(codec="utf-8", min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"])


@given(text=st.text(letters | st.sampled_from("\n\t")))
def test_round_trip(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_known_tokens(tokenizer):
    assert tokenizer.tokenize("The capital of France is") == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert len(tokenizer) == 49152


def test_every_digit_is_a_token(tokenizer):
    assert tokenizer.tokenize("in 2026") == ["in", "Ġ", "2", "0", "2", "6"]


def test_control_tokens_are_one_token_and_can_be_left_out(tokenizer):
    ids = tokenizer("<|im_start|>user<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_config_is_that_of_the_model(smollm2):
    config = json.loads((smollm2 / "config.json").read_text())
    figures = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [config[name] for name in figures] == [30, 576, 9, 3, 49152]
    assert config["rope_parameters"]["rope_theta"] == 100000
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
