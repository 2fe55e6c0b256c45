"""Bytes of the KV cache, as this vLLM lays them out: per token, per block, per request.

The sizes follow ``vllm/v1/kv_cache_interface.py`` and the attention backends' ``customize_spec``; ``tests/planner``
compares them with those classes. A layer's page holds ``block_size`` tokens of ``slots`` KV heads of ``content`` bytes
each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from elastic_tools.planner.errors import PlanError, nearest
from elastic_tools.planner.model import ELEMENT, ModelConfig

BLOCK = 16  # tokens, vLLM's default on CUDA
MLA_FP8_BLOCK = 64  # FlashMLA, which vLLM takes for an FP8 latent on Hopper, has no other
SCALE = 4  # bytes of the float32 scale that the per-token-head formats keep for a key and for a value
PACKED_SKIP = 2  # layers at either end that TurboQuant leaves uncompressed in a dense model
# Tokens of the blocks of TurboQuant: vLLM makes them longer until a page of the format, taken as one byte an element,
# covers a page of 16 tokens of the 16-bit layers at the ends.
PACKED_BLOCK = 32
IN_FLIGHT = 2  # steps that vLLM schedules before the first is done: its asynchronous scheduling, on by default


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
    type. ``bits`` is the nominal size of an element. ``latent`` says whether vLLM has the format for the latent vector
    of MLA, whose elements then take ``bits`` bits. ``skip`` is the number of layers at either end that stay
    uncompressed. ``least_sm`` is the compute capability that vLLM's kernels need, times ten. ``quality`` orders formats
    from exact (0) to coarse.
    """

    name: str
    bits: float
    content: Callable[[int], int] | None
    latent: bool
    quality: int
    skip: int = 0
    least_sm: int = 0

    def __reduce__(self) -> tuple[Callable[[str], "CacheDtype"], tuple[str]]:
        """Between processes a format goes by its name, since functions without one cannot."""
        return cache_dtype, (self.name,)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("auto", 16, None, True, 0),
        CacheDtype("float16", 16, lambda d: 4 * d, True, 0),
        CacheDtype("bfloat16", 16, lambda d: 4 * d, True, 0, least_sm=80),
        CacheDtype("fp8", 8, lambda d: 2 * d, True, 1),
        CacheDtype("fp8_e4m3", 8, lambda d: 2 * d, True, 1),
        CacheDtype("fp8_e5m2", 8, lambda d: 2 * d, False, 2),
        CacheDtype("fp8_per_token_head", 8, lambda d: 2 * d + 2 * SCALE, False, 1),
        CacheDtype("int8_per_token_head", 8, lambda d: 2 * d + 2 * SCALE, False, 1),
        CacheDtype("int4_per_token_head", 4, lambda d: d // 2 * 2 + 2 * SCALE, False, 4),
        CacheDtype("nvfp4", 4, lambda d: 2 * (d // 2 + d // 16), False, 3, least_sm=100),
        CacheDtype("turboquant_k8v4", 6, _turboquant(8, 4), False, 3, PACKED_SKIP),
        CacheDtype("turboquant_4bit_nc", 4, _turboquant(4, 4), False, 4, PACKED_SKIP),
        CacheDtype("turboquant_k3v4_nc", 3.5, _turboquant(3, 4), False, 5, PACKED_SKIP),
        CacheDtype("turboquant_3bit_nc", 3, _turboquant(3, 3), False, 6, PACKED_SKIP),
    )
}
ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "3bit": "turboquant_3bit_nc",
    "nvfp4_4over6": "nvfp4",  # the same layout, with scales that are chosen otherwise
}
# What else vLLM has: why the planner does not plan for it, and what comes nearest.
REFUSED = {
    "ultraquant_4bit": ("runs on AMD's GPUs only, and the planner knows none", "turboquant_4bit_nc"),
    "fp8_inc": ("runs on Intel's Gaudi only, and the planner knows none", "fp8"),
    "fp8_ds_mla": ("is for DeepSeek's sparse attention, which the planner has no cost model for", "fp8"),
    "nvfp4_ds_mla": ("is for DeepSeek's sparse attention, which the planner has no cost model for", "fp8"),
}


def cache_dtype(name: str) -> CacheDtype:
    """A format by vLLM's name for it, or by a short one. Raises ``PlanError``."""
    known = ALIASES.get(name, name)
    if known in REFUSED:
        reason, near = REFUSED[known]
        raise PlanError(f"{known} {reason}; the nearest is {near}.")
    if known not in DTYPES:
        near = nearest(name, [*DTYPES, *ALIASES])
        raise PlanError(f"There is no cache dtype {name!r}; the nearest is {near}.")
    return DTYPES[known]


def cache_problem(model: ModelConfig, dtype: CacheDtype, sm: int) -> str | None:
    """Why vLLM has no such cache for a model on a GPU of compute capability ``sm``, times ten; None if it has.

    The sentence ends with the nearest choice.
    """
    if sm < dtype.least_sm:
        return (
            f"{dtype.name} needs compute capability {dtype.least_sm / 10:.1f}, and this GPU has {sm / 10:.1f}; "
            "the nearest is int4_per_token_head."
        )
    if model.mla and not dtype.latent:
        return f"{model.name} has MLA, for which vLLM has no {dtype.name} cache; the nearest is fp8."
    if model.mla and dtype.bits == 8 and sm < 89:
        return f"{model.name} has MLA, whose fp8 cache needs compute capability 8.9; the nearest is auto."
    if dtype.skip and len(set(model.windows)) > 1:
        return (
            f"{model.name} mixes sliding windows, and {dtype.name} leaves layers uncompressed; the planner does not "
            "know how vLLM would lay that out. The nearest is int4_per_token_head."
        )
    return None


def block_tokens(model: ModelConfig, dtype: CacheDtype, sm: int) -> int:
    """Tokens of a block when nobody says --block-size."""
    if model.mla:
        return MLA_FP8_BLOCK if dtype.bits == 8 and sm == 90 else BLOCK
    return PACKED_BLOCK if dtype.skip else BLOCK


def layer_token_bytes(model: ModelConfig, dtype: CacheDtype, tp: int, layer: int) -> int:
    """Bytes that one token takes in one layer on one rank."""
    if model.mla:
        return (model.mla.kv_rank + model.mla.rope) * int(dtype.bits) // 8
    compressed = dtype.skip <= layer < model.layers - dtype.skip
    plain = 2 * model.head_dim * ELEMENT
    content = dtype.content(model.head_dim) if dtype.content and compressed else plain
    return model.kv_heads_on(tp) * content


@dataclass(frozen=True)
class KVLayout:
    """The KV cache of one rank.

    Layers with the same window form groups. A block holds one page for each layer of the largest group, and a request
    takes blocks for every group by itself, so a block id is never shared between groups. A token of a long request
    takes ``bytes_per_token`` less what layers with a window let go of.
    """

    block: int  # tokens
    bytes_per_block: int
    groups: tuple[tuple[int, int], ...]  # window (0: full attention) and how many groups have it
    bytes_per_token: int  # over all layers, as if every layer kept every token

    def blocks(self, available: int) -> int:
        """Blocks that ``available`` bytes hold, as the engine counts them: with the null block."""
        return max(0, available) // self.bytes_per_block

    def request_blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that a request of ``tokens`` tokens takes at most, with ``in_flight`` tokens scheduled and not done.

        A layer with a window keeps them besides the window, and a window may begin inside a block; vLLM counts the
        same (``SlidingWindowSpec.max_admission_blocks_per_request``).
        """
        total = 0
        for window, count in self.groups:
            if window:
                kept = min(window - 1 + in_flight, tokens)
                total += count * (-(-kept // self.block) + 1)
            else:
                total += count * -(-tokens // self.block)
        return total


def kv_layout(model: ModelConfig, dtype: CacheDtype, tp: int = 1, block: int = BLOCK) -> KVLayout:
    """How the cache of ``model`` lies on one of ``tp`` ranks. Raises ``PlanError`` for sizes that vLLM refuses."""
    model.check_tp(tp)
    if block < 1 or block % 16:
        raise PlanError(f"A block of {block} tokens cannot be had: it must be a multiple of 16.")
    per_layer = [layer_token_bytes(model, dtype, tp, layer) for layer in range(model.layers)]
    windows = Counter(model.windows)
    if len(windows) == 1:
        return KVLayout(block, block * sum(per_layer), ((model.windows[0], 1),), sum(per_layer))
    # vLLM makes groups of equal length: as long as the smallest kind, or the largest where they differ by less than
    # half.
    least, most = min(windows.values()), max(windows.values())
    length = most if most < 1.5 * least else least
    groups = tuple((window, -(-count // length)) for window, count in sorted(windows.items()))
    return KVLayout(block, block * per_layer[0] * length, groups, sum(per_layer))
