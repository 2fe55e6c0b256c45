"""Whether the server's memory followed the resizes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_tools.demo.story import Resize
from elastic_tools.demo.watch import Sample

LEAST_NOISE = 8 << 20  # bytes: what a process takes or gives back at any time
MOST_NOISE = 64 << 20  # bytes: more than that would hide what is to be shown
_APART = 1.5  # seconds that lie about between the readings before and after a resize


@dataclass(frozen=True)
class Row:
    """One resize in figures. Bytes, over all ranks."""

    resize: Resize
    asked: int  # from the size before to the size asked
    done: int  # to the size that was reached
    measured: int  # what the memory did meanwhile

    @property
    def error(self) -> int:
        return self.measured - self.done


@dataclass(frozen=True)
class Verdict:
    """The rows, and what they may be off."""

    rows: list[Row]
    chunk: int
    noise: int
    failed_resizes: list[Resize]

    @property
    def allowed(self) -> int:
        return self.chunk + self.noise

    @property
    def strayed(self) -> list[Row]:
        """Resizes that the memory did not follow."""
        return [row for row in self.rows if abs(row.error) > self.allowed]

    @property
    def correlation(self) -> float | None:
        """Between what the resizes did and what the memory did; None where there are too few."""
        done, measured = [row.done for row in self.rows], [row.measured for row in self.rows]
        if len(set(done)) < 2 or len(set(measured)) < 2:
            return None
        return statistics.correlation(done, measured)


def judge(resizes: Sequence[Resize], samples: Sequence[Sample], block_bytes: int, chunk_blocks: int) -> Verdict:
    """Compares each resize with the memory around it.

    Args:
        resizes: In order.
        samples: Of the whole run.
        block_bytes: Bytes of a block over all ranks.
        chunk_blocks: Blocks that are attached or detached together.

    """
    failed = [resize for resize in resizes if "to" not in resize.answer]
    rows = [
        Row(
            resize,
            asked=(resize.asked_blocks - resize.answer["from"]) * block_bytes,
            done=(resize.answer["to"] - resize.answer["from"]) * block_bytes,
            measured=resize.memory_after - resize.memory_before,
        )
        for resize in resizes
        if "to" in resize.answer
    ]
    noise = min(max(measure_noise(resizes, samples), LEAST_NOISE), MOST_NOISE)
    return Verdict(rows, chunk_blocks * block_bytes, noise, failed)


def measure_noise(resizes: Sequence[Resize], samples: Sequence[Sample]) -> int:
    """The largest change of the memory, over the time that a resize is measured in, while the size stayed."""
    busy = [(resize.started - 1, resize.ended + 1) for resize in resizes]
    largest = 0
    for index, first in enumerate(samples):
        for last in samples[index + 1 :]:
            if last.at - first.at > _APART or any(begin < last.at and first.at < end for begin, end in busy):
                break
            largest = max(largest, abs(last.memory - first.memory))
    return largest
