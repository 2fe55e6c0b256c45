# SPDX-License-Identifier: Apache-2.0
"""How much memory a step takes for its activations, by the tokens that it computes."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A step takes what sampling takes, however few tokens it has. A peak above that by less tells nothing of tokens.
_ABOVE_FLOOR = 1.05

_FEW = 32  # tokens

# Tokens of a step, and the bytes that it took at its peak.
Peaks = Mapping[int, int]


@dataclass(frozen=True)
class Line:
    """Bytes of a step: a floor, and above it a straight line in its tokens."""

    floor: int  # bytes
    intercept: float  # bytes
    slope: float  # bytes per token
    residual: float  # how far a measured peak was from the line before it was raised, as a part of the peak, at most

    def nbytes(self, tokens: int) -> int:
        """Bytes of a step of so many tokens."""
        return math.ceil(max(self.floor, self.intercept + self.slope * tokens))

    def tokens(self, nbytes: int, most: int) -> int:
        """How many tokens a step in `nbytes` bytes can have, up to `most`. 0 if not even one fits."""
        # Not by division: where the slope is small beside the rest, that is off by more than one token.
        return bisect_right(range(1, most + 1), nbytes, key=self.nbytes)


def fit(peaks: Peaks) -> Line:
    """The line through measured peaks by least squares, raised until none of them lies above it.

    Raises:
        ValueError: There is no peak.

    """
    if not peaks:
        raise ValueError("no peak was measured")
    lowest = peaks[min(peaks)]
    floor = max(nbytes for nbytes in peaks.values() if nbytes <= _ABOVE_FLOOR * lowest)
    points = [(tokens, nbytes) for tokens, nbytes in sorted(peaks.items()) if nbytes > floor]
    # One point above the floor gives a line as well.
    points = points if len(points) > 1 else [(min(peaks), floor), *points]
    if len(points) == 1:
        return Line(floor, intercept=0.0, slope=0.0, residual=0.0)
    mean_tokens = sum(tokens for tokens, _ in points) / len(points)
    mean_bytes = sum(nbytes for _, nbytes in points) / len(points)
    products = sum((tokens - mean_tokens) * (nbytes - mean_bytes) for tokens, nbytes in points)
    slope = max(0.0, products / sum((tokens - mean_tokens) ** 2 for tokens, _ in points))
    intercept = mean_bytes - slope * mean_tokens
    errors = [nbytes - (intercept + slope * tokens) for tokens, nbytes in points]
    residual = max(abs(error) / nbytes for error, (_, nbytes) in zip(errors, points, strict=True) if nbytes)
    return Line(floor, intercept + max(0.0, *errors), slope, residual)


@dataclass(frozen=True)
class ActivationModel:
    """What a step takes, without and with a request that wants the log probabilities of its prompt.

    Structured output, and several answers to one prompt (`n`), are in it: every step was measured with sampling
    for as many sequences as there can be, and with a grammar's mask for every one of them.
    """

    plain: Line
    with_prompt_logprobs: Line  # for few tokens; for many, a step takes what it takes without, at least

    @property
    def residual(self) -> float:
        """How far a measured peak was from its line, as a part of the peak, at most."""
        return max(self.plain.residual, self.with_prompt_logprobs.residual)

    def nbytes(self, tokens: int, prompt_logprobs: bool) -> int:
        """Bytes of a step of so many tokens."""
        return max(line.nbytes(tokens) for line in self._lines(prompt_logprobs))

    def tokens(self, nbytes: int, most: int, prompt_logprobs: bool) -> int:
        """How many tokens a step in `nbytes` bytes can have, up to `most`."""
        return min(line.tokens(nbytes, most) for line in self._lines(prompt_logprobs))

    def _lines(self, prompt_logprobs: bool) -> tuple[Line, ...]:
        return (self.plain, self.with_prompt_logprobs) if prompt_logprobs else (self.plain,)


def agree(ranks: Sequence[tuple[Peaks, Peaks]]) -> ActivationModel:
    """The model that holds on every rank.

    Args:
        ranks: For each rank, peaks without and with log probabilities of prompts, at the same tokens on every rank.

    Raises:
        ValueError: There is no rank, or a peak is missing.

    """
    if not ranks:
        raise ValueError("no rank has measured anything")
    largest = [{tokens: max(rank[kind][tokens] for rank in ranks) for tokens in ranks[0][kind]} for kind in (0, 1)]
    return ActivationModel(fit(largest[0]), fit(largest[1]))


def token_counts(least: int, most: int) -> tuple[list[int], list[int]]:
    """The tokens of the steps to measure, without and with the log probabilities of prompts, in ascending order.

    Those with are few tokens, since they take as many times the vocabulary, and nothing else.
    """
    plain = {min(least, most), *(max(1, most * part // 4) for part in (1, 2, 3, 4))}
    return sorted(plain), sorted({min(most, least + more) for more in (_FEW, 2 * _FEW, 4 * _FEW)})
