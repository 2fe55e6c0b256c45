# SPDX-License-Identifier: Apache-2.0
"""The prefill reserve: memory for the activations of the largest step, and how much of it the cache may borrow.

A policy says how much is lent, and when. What is lent bounds the tokens of a step, so that no step needs more than
the part of the reserve that is left. `always-lent` alone breaks that rule, to show what happens then.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from vllm.v1.elastic_kv.activation import ActivationModel

ReservePolicy = Literal["static", "small-chunk", "reclaim", "adaptive", "always-lent"]
RESERVE_POLICIES: tuple[str, ...] = get_args(ReservePolicy)
LENDING: tuple[str, ...] = RESERVE_POLICIES[1:]
# Those that take back what they have lent.
BY_PHASE: tuple[str, ...] = ("reclaim", "adaptive")

# Tokens of prompts that a step can have at any time, beside one for each request that decodes.
LEAST_CHUNK = 64
# The same where the log probabilities of a prompt are wanted.
LEAST_SCORED = 16


@dataclass(frozen=True)
class Reserve:
    """Sizes of the reserve. Bytes count on every rank, and tokens are those of a step."""

    policy: str
    model: ActivationModel
    most: int  # tokens of the largest step
    small: int  # tokens of a step with the policy `small-chunk`
    kept: int  # tokens that a step can have however much is lent: all that decode, and some
    kept_scored: int  # the same for one with log probabilities of prompts

    @property
    def nbytes(self) -> int:
        """The whole reserve: what the largest step takes."""
        return max(self.model.nbytes(self.most, prompt_logprobs=False), self._kept_bytes)

    @property
    def lendable_bytes(self) -> int:
        """How much of it the policy lends, at most."""
        if self.policy not in LENDING:
            return 0
        if self.policy == "small-chunk":
            return self.nbytes - max(self.model.nbytes(self.small, prompt_logprobs=False), self._kept_bytes)
        return self.nbytes - self._kept_bytes

    def budget(self, borrowed_bytes: int, prompt_logprobs: bool) -> int:
        """How many tokens a step may have.

        Args:
            borrowed_bytes: What the cache holds of the reserve.
            prompt_logprobs: Whether the step may have a request that wants the log probabilities of its prompt.

        """
        if self.policy == "always-lent":
            return self.most
        tokens = self.model.tokens(self.nbytes - borrowed_bytes, self.most, prompt_logprobs)
        return min(tokens, self.small) if self.policy == "small-chunk" else tokens

    @property
    def _kept_bytes(self) -> int:
        return max(
            self.model.nbytes(self.kept, prompt_logprobs=False),
            self.model.nbytes(self.kept_scored, prompt_logprobs=True),
        )

    def describe(self, block_bytes: int, block_tokens: int) -> str:
        """One line: what reclaim gains for this model, and whether a smaller chunk would gain more."""
        reclaim = self.nbytes - self._kept_bytes
        smaller = self.nbytes - max(self.model.nbytes(self.small, prompt_logprobs=False), self._kept_bytes)
        gains = [nbytes // block_bytes * block_tokens for nbytes in (reclaim, smaller)]
        if gains[0] < block_tokens:
            verdict = "neither gains anything here"
        elif smaller >= 0.9 * reclaim:
            verdict = "a smaller chunk gains as much, or nearly, and has nothing to take back"
        else:
            verdict = "reclaim gains more than a smaller chunk"
        return (
            f"the prefill reserve is {self.nbytes} bytes for steps of {self.most} tokens; reclaim lends room for "
            f"{gains[0]} tokens of KV cache while requests decode, chunks of {self.small} tokens would give room for "
            f"{gains[1]} at all times: {verdict}. Residual of the model: "
            f"{100 * self.model.residual:.0f}%"
        )


def make_reserve(policy: str, model: ActivationModel, most: int, small: int, decodes: int) -> Reserve:
    """The reserve of an engine.

    Args:
        policy: One of `RESERVE_POLICIES`, or another, which lends nothing.
        model: What steps take.
        most: Tokens of the largest step.
        small: Tokens of a step with the policy `small-chunk`.
        decodes: Tokens of a step in which as many requests decode as there can be.

    """
    kept = min(most, decodes + LEAST_CHUNK)
    return Reserve(policy, model, most, max(kept, min(small, most)), kept, min(most, decodes + LEAST_SCORED))
