# SPDX-License-Identifier: Apache-2.0
"""Several calls, all of them or none."""

from collections.abc import Callable
from typing import Any

from .page_driver import PageDriverError


class ArenaBrokenError(RuntimeError):
    """A call failed and what was done could not be undone: the arena no longer
    knows which of the chunks have pages. Not a PageDriverError, since nothing
    may go on from here.
    """


class Undo:
    """Runs what was added, last first, if the block it guards fails."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __enter__(self) -> "Undo":
        return self

    def add(self, function: Callable[..., None], *arguments: Any) -> None:
        self._steps.append((function, arguments))

    def do_now(self) -> None:
        """Run it although nothing failed. What is left where a step fails, is run as after any failure."""
        while self._steps:
            function, arguments = self._steps[-1]
            function(*arguments)
            self._steps.pop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        failures = []
        for function, arguments in reversed(self._steps):
            try:
                function(*arguments)
            except (PageDriverError, ValueError) as failure:  # go on, and undo as much as can be undone
                failures.append(str(failure))
        if failures:
            raise ArenaBrokenError(f"{error}; and it could not be undone: {'; '.join(failures)}") from error
