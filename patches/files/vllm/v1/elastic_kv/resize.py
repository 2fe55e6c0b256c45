# SPDX-License-Identifier: Apache-2.0
"""What a resize may ask for, and what it answers."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)
from vllm.config.elastic_kv import parse_size, shown

UNITS = ("blocks", "bytes", "tokens", "fraction")

Outcome = Literal["done", "partial", "refused"]

_LONGEST_NAME = 64  # characters of an unknown field that are shown


class ResizeRequest(BaseModel):
    """A size to resize the KV cache to, in exactly one unit."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    blocks: Annotated[StrictInt, Field(gt=0, lt=2**62)] | None = None
    """Resident blocks, the null block among them."""

    bytes: int | str | None = None
    """Bytes on each rank, as a whole number or as text such as `"512MiB"`."""

    tokens: Annotated[StrictInt, Field(gt=0, lt=2**62)] | None = None
    """Tokens that the resident blocks have room for."""

    fraction: Annotated[StrictFloat, Field(gt=0, le=1)] | None = None
    """Part of the capacity."""

    dry_run: StrictBool = False
    """Tell what would happen, and do nothing."""

    allow_preemption: StrictBool = True
    """Whether running requests may be preempted to get there. They wait, and go on
    later with the tokens they have. Without it, a shrink stops where the blocks that
    requests use have no more room."""

    timeout_s: Annotated[StrictFloat, Field(gt=0, le=3600, allow_inf_nan=False)] = 60.0
    """Seconds after which the resize stops where it is."""

    @field_validator("bytes", mode="before")
    @classmethod
    def _parse_bytes(cls, value: Any) -> int | None:
        return None if value is None else parse_size(value)

    @model_validator(mode="after")
    def _one_unit(self) -> "ResizeRequest":
        given = [unit for unit in UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(UNITS)}; got {', '.join(given) or 'none'}")
        return self

    def target_blocks(self, capacity_blocks: int, base_blocks: int, block_bytes: int, block_tokens: int) -> int:
        """The wanted size in blocks, not yet rounded to chunks.

        Args:
            capacity_blocks: The most there can be.
            base_blocks: The least there can be.
            block_bytes: Bytes of a block on the rank where it takes most.
            block_tokens: Tokens in a block.

        Raises:
            ValueError: It lies outside base and capacity. The message names both.

        """
        unit = next(unit for unit in UNITS if getattr(self, unit) is not None)
        value = getattr(self, unit)
        rounded: dict[str, Callable[[], int]] = {
            "blocks": lambda: value,
            "bytes": lambda: value // block_bytes,
            "tokens": lambda: -(-value // block_tokens),
            # As it was written: 0.29 of 100 is 29, though 0.29 * 100 is a little less.
            "fraction": lambda: math.floor(Fraction(repr(value)) * capacity_blocks),
        }
        blocks = rounded[unit]()
        if not base_blocks <= blocks <= capacity_blocks:
            raise ValueError(
                f"{unit}={value!r} is {blocks} blocks of {block_bytes} bytes and {block_tokens} tokens; "
                f"the cache can have {base_blocks} (its base) to {capacity_blocks} (its capacity)"
            )
        return blocks


@dataclass
class ResizeResult:
    """How a resize went, or would go. Sizes are blocks, `moved_bytes` are bytes on each
    rank, `preempted` are requests, and durations are milliseconds.
    """

    outcome: Outcome
    before: int
    after: int
    evicted: int = 0
    moved: int = 0
    moved_bytes: int = 0
    preempted: int = 0
    duration_ms: float = 0.0
    pause_ms: float = 0.0
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The answer as the interface has it, with `from` and `to`."""
        names = {"before": "from", "after": "to"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


def unwrap(answer: dict[str, Any]) -> dict[str, Any]:
    """An engine core's answer to a resize, for the caller.

    Raises:
        ValueError: The engine core found the request invalid.

    """
    if "invalid" in answer:
        raise ValueError(answer["invalid"])
    return answer


def explain(error: ValidationError) -> str:
    """One line that names each wrong field of a `ResizeRequest`, and its value."""
    faults: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        field = str(item["loc"][0])[:_LONGEST_NAME] if item["loc"] else "the request"
        fault = item["msg"].removeprefix("Value error, ")
        if item["loc"] and item["type"] != "value_error":  # ours name the value already
            fault = f"{fault}, got {shown(item['input'])}"
        faults.setdefault(field, fault)
    return "; ".join(f"{field}: {fault}" for field, fault in faults.items())
