"""Bytes of the KV cache, as this vLLM lays them out: per token, per block, per request.

The sizes follow ``vllm/v1/kv_cache_interface.py`` and the attention backends' ``customize_spec``; ``tests/planner``
compares them with those classes. A layer's page holds ``block_size`` tokens of ``slots`` KV heads of ``content`` bytes
each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from elastic_tools.planner.errors import PlanError, nearest
from elastic_tools.planner.model import ModelConfig

BLOCK = 16  # tokens, vLLM's default on CUDA
SCALE = 4  # bytes of the float32 scale that the per-token-head formats keep for a key and for a value
PACKED_SKIP = 2  # layers at either end that TurboQuant and UltraQuant leave uncompressed in a dense model


def _turboquant(key_bits: int, value_bits: int) -> Callable[[int], int]:
    """Bytes of a key and a value of one head. FP8 keys have no norm; sizes are rounded up to an even number."""

    def size(dim: int) -> int:
        key = dim if key_bits == 8 else -(-dim * key_bits // 8) + 2
        value = -(-dim * value_bits // 8) + 4
        return -(-(key + value) // 2) * 2

    return size


@dataclass(frozen=True)
class CacheDtype:
    """A cache format.

    ``content(dim)`` is what a key and a value of ``dim`` elements take together, in bytes; None for the model's own
    type. ``bits`` is the nominal size of an element. ``latent(dim)`` is the same for the one latent vector of MLA, or
    None where vLLM has no such format. ``skip`` is the number of layers at either end that stay uncompressed.
    ``least_sm`` is the compute capability that vLLM's kernels need, times ten. ``quality`` orders formats from exact
    (0) to coarse.
    """

    name: str
    bits: float
    content: Callable[[int], int] | None
    latent: Callable[[int], int] | None
    quality: int
    skip: int = 0
    least_sm: int = 0

    def __reduce__(self) -> tuple[Callable[[str], "CacheDtype"], tuple[str]]:
        """Between processes a format goes by its name, since functions without one cannot."""
        return cache_dtype, (self.name,)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("auto", 16, None, None, 0),
        CacheDtype("float16", 16, lambda d: 4 * d, lambda d: 2 * d, 0),
        CacheDtype("bfloat16", 16, lambda d: 4 * d, lambda d: 2 * d, 0, least_sm=80),
        CacheDtype("fp8", 8, lambda d: 2 * d, lambda d: d, 1),
        CacheDtype("fp8_e4m3", 8, lambda d: 2 * d, lambda d: d, 1),
        CacheDtype("fp8_e5m2", 8, lambda d: 2 * d, lambda d: d, 2),
        CacheDtype("fp8_per_token_head", 8, lambda d: 2 * d + 2 * SCALE, lambda d: d + 2 * SCALE, 1),
        CacheDtype("int8_per_token_head", 8, lambda d: 2 * d + 2 * SCALE, lambda d: d + 2 * SCALE, 1),
        CacheDtype("int4_per_token_head", 4, lambda d: d // 2 * 2 + 2 * SCALE, lambda d: d // 2 + 2 * SCALE, 4),
        CacheDtype("nvfp4", 4, lambda d: 2 * (d // 2 + d // 16), None, 3, least_sm=100),
        CacheDtype("turboquant_k8v4", 6, _turboquant(8, 4), None, 3, PACKED_SKIP),
        CacheDtype("turboquant_4bit_nc", 4, _turboquant(4, 4), None, 4, PACKED_SKIP),
        CacheDtype("turboquant_k3v4_nc", 3.5, _turboquant(3, 4), None, 5, PACKED_SKIP),
        CacheDtype("turboquant_3bit_nc", 3, _turboquant(3, 3), None, 6, PACKED_SKIP),
        CacheDtype("ultraquant_4bit", 4, lambda d: 2 * (d // 2 + d // 32), None, 4, PACKED_SKIP),
    )
}
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "3bit": "turboquant_3bit_nc",
    "nvfp4_4over6": "nvfp4",
}


def cache_dtype(name: str) -> CacheDtype:
    """A format by vLLM's name for it, or by a short one. Raises ``PlanError``."""
    known = ALIASES.get(name, name)
    if known not in DTYPES:
        near = nearest(name, [*DTYPES, *ALIASES])
        raise PlanError(f"There is no cache dtype {name!r}; the nearest is {near}.")
    return DTYPES[known]


def layer_token_bytes(model: ModelConfig, dtype: CacheDtype, tp: int, layer: int) -> int:
    """Bytes that one token takes in one layer on one rank."""
    compressed = dtype.skip <= layer < model.layers - dtype.skip
    if model.mla:
        width = model.mla.kv_rank + model.mla.rope
        if dtype.content is None:
            return model.element * width
        if dtype.latent is None:
            raise PlanError(f"{model.name} has MLA, for which vLLM has no {dtype.name} cache; the nearest is fp8.")
        return dtype.latent(width)
    plain = 2 * model.head_dim * model.element
    content = dtype.content(model.head_dim) if dtype.content and compressed else plain
    return model.kv_heads_on(tp) * content


@dataclass(frozen=True)
class KVLayout:
    """The KV cache of one rank.

    Layers with the same window form groups. A block holds one page for each layer of the largest group, and a request
    takes blocks for every group by itself, so a block id is never shared between groups.
    """

    block: int  # tokens
    bytes_per_block: int
    groups: tuple[tuple[int, int], ...]  # window (0: full attention) and how many groups have it
    bytes_per_token: int  # over all layers, as if every layer kept every token

    def blocks(self, available: int) -> int:
        """Blocks that ``available`` bytes hold, as the engine counts them: with the null block."""
        return max(0, available) // self.bytes_per_block

    def request_blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks that a request of ``tokens`` tokens takes when ``in_flight`` of them were scheduled last."""
        total = 0
        for window, count in self.groups:
            if window:
                kept = min(window - 1 + in_flight, tokens)
                total += count * (-(-kept // self.block) + 1)
            else:
                total += count * -(-tokens // self.block)
        return total

    def tokens(self, blocks: int, length: int) -> int:
        """The capacity in tokens that vLLM logs: the requests of ``length`` tokens that fit, times their length."""
        return int(blocks / self.request_blocks(length) * length)


def kv_layout(model: ModelConfig, dtype: CacheDtype, tp: int = 1, block: int = BLOCK) -> KVLayout:
    """How the cache of ``model`` lies on one of ``tp`` ranks. Raises ``PlanError`` for sizes that vLLM refuses."""
    model.check_tp(tp)
    if block < 1 or block % 16:
        raise PlanError(f"A block of {block} tokens cannot be had: it must be a multiple of 16.")
    per_layer = [layer_token_bytes(model, dtype, tp, layer) for layer in range(model.layers)]
    windows = Counter(model.windows)
    if len(windows) == 1:
        window = model.windows[0]
        return KVLayout(block, block * sum(per_layer), ((window, 1),), sum(per_layer))
    if len(set(per_layer)) > 1:
        raise PlanError(
            f"{model.name} mixes sliding windows, and {dtype.name} leaves layers uncompressed; the "
            "planner does not know "
            "how vLLM would lay that out. The nearest is int4_per_token_head."
        )
    # vLLM makes groups of equal length: as long as the smallest kind, or the largest where they differ by less than
    # half.
    least, most = min(windows.values()), max(windows.values())
    length = most if most < 1.5 * least else least
    groups = tuple((window, -(-count // length)) for window, count in sorted(windows.items()))
    return KVLayout(block, block * per_layer[0] * length, groups, sum(per_layer))
