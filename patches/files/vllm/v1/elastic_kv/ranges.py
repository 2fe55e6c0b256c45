# SPDX-License-Identifier: Apache-2.0
"""Ranges of addresses, each an address and bytes, taken together where one call does for several."""

from collections.abc import Iterable, Sequence


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in order, with neighbours made one."""
    made: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if made and sum(made[-1]) == address:
            made[-1] = (made[-1][0], made[-1][1] + nbytes)
        else:
            made.append((address, nbytes))
    return made


def evenly_spaced(ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The ranges, which are in order, in groups that one strided view covers: of one size, and equally far apart."""
    groups: list[list[tuple[int, int]]] = []
    for this in ranges:
        group = groups[-1] if groups else []
        fits = group and group[-1][1] == this[1]
        if fits and (len(group) == 1 or this[0] - group[-1][0] == group[1][0] - group[0][0]):
            group.append(this)
        else:
            groups.append([this])
    return groups
