"""Weights: llama.cpp's order of rows, and directories derived from the real model."""

import json

import numpy as np
import pytest
from elastic_tools import model
from elastic_tools.gguf_llama import unpermute
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


def rotate_halves(x, angle):
    """Hugging Face's rotary embedding of one head: row i turns with row i + half."""
    first, second = np.split(x, 2)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


def rotate_neighbours(x, angle):
    """llama.cpp's: row 2i turns with row 2i + 1."""
    first, second = x[0::2], x[1::2]
    out = np.empty_like(x)
    out[0::2] = first * np.cos(angle) - second * np.sin(angle)
    out[1::2] = second * np.cos(angle) + first * np.sin(angle)
    return out


@given(heads=st.integers(1, 5), pairs=st.integers(1, 6), columns=st.integers(1, 4), seed=st.integers(0, 99))
def test_unpermuted_weight_gives_the_same_attention(heads, pairs, columns, seed):
    """Queries times keys, each rotated in its own convention, agree; that is all that attention sees of q and k."""
    random = np.random.default_rng(seed)
    q, k = random.standard_normal((2, heads * 2 * pairs, columns))
    x, y, angle = random.standard_normal(columns), random.standard_normal(columns), random.standard_normal(pairs)

    def scores(q, k, rotate):
        queries, keys = (q @ x).reshape(heads, -1), (k @ y).reshape(heads, -1)
        return [rotate(query, angle) @ rotate(key, 3 * angle) for query, key in zip(queries, keys, strict=True)]

    theirs = scores(q, k, rotate_neighbours)
    ours = scores(unpermute(q, heads), unpermute(k, heads), rotate_halves)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_unpermute_on_one_head():
    rows = np.array([[0], [1], [2], [3], [4], [5]], dtype=np.float32)
    assert unpermute(rows, 1).ravel().tolist() == [0, 2, 4, 1, 3, 5]
    assert unpermute(rows, 3).ravel().tolist() == [0, 1, 2, 3, 4, 5]


def logits(path, text="Once upon a time there were"):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(**tokens).logits.numpy()


def test_padded_heads_compute_the_same(smollm2, tmp_path):
    padded = model.padded_heads(tmp_path / "padded")
    config = json.loads((padded / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (12, 4, 64)
    np.testing.assert_allclose(logits(padded), logits(smollm2), rtol=1e-4, atol=1e-4)


def test_truncated_keeps_the_first_layers_and_what_is_outside(smollm2, tmp_path):
    short = model.weights(model.truncated(tmp_path / "short", layers=2))
    full = model.weights(smollm2)
    assert {model.layer_of(name) for name in short} == {-1, 0, 1}
    assert len(short) == 2 + 2 * 9
    assert all(np.array_equal(value, full[name]) for name, value in short.items())


def test_tiny_llama_depends_on_its_seed_only(smollm2, tmp_path):
    one, again, other = (model.tiny_llama(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])
    read = [(path / "model.safetensors").read_bytes() for path in (one, again, other)]
    assert read[0] == read[1] != read[2]


def test_tiny_llama_has_the_shape_asked_for(smollm2, tmp_path):
    path = model.tiny_llama(tmp_path / "tiny", layers=3, heads=4, kv_heads=2, hidden=96)
    assert logits(path).shape[-1] == 49152
    assert np.isfinite(logits(path)).all()


def test_directory_appears_only_when_complete(tmp_path):
    path = tmp_path / "deep" / "model"

    def break_half_way():
        with model.new_directory(path) as folder:
            (folder / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_half_way()
    assert list(path.parent.iterdir()) == []


def test_new_directory_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "model"
    for name in ("old", "new"):
        with model.new_directory(path) as folder:
            (folder / name).touch()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_finished_model_is_not_built_again(smollm2, monkeypatch):
    monkeypatch.setattr(model, "gguf_file", lambda pin: pytest.fail("downloaded again"))
    assert model.smollm2() == smollm2
