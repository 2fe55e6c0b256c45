# SPDX-License-Identifier: Apache-2.0
"""One change at a time, which the background may carry out."""

from collections.abc import Callable
from concurrent.futures import Future, wait

from .background import Background
from .page_driver import PageDriverError
from .undo import ArenaBrokenError

_LONGEST_S = 60.0


class Turn:
    """Whose turn it is: the caller's, or that of what it began in the background."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._begun: Future[None] | None = None

    def begin(self, change: Callable[[], None]) -> None:
        """Let the background do `change` after what it has to do."""
        begun = self._begun = Future()
        self._background.submit(lambda: _carry_out(change, begun))

    def now(self, change: Callable[[], object]) -> bool:
        """Do `change` at once, and let `ended` tell where the driver refused. Returns whether it did not."""
        self._begun = Future()
        try:
            change()
        except PageDriverError as error:
            self._begun.set_exception(error)
            return False
        self._begun.set_result(None)
        return True

    def ended(self) -> bool:
        """Whether what was begun last has ended. Raises what it raised, as often as one asks."""
        if self._begun is None:
            return True
        if not self._begun.done():
            return False
        self._begun.result()
        return True

    def wait(self) -> None:
        """Wait until what was begun has ended, however it does. The change itself passes.

        Raises:
            ArenaBrokenError: It does not end.

        """
        if self._begun is None or self._background.is_current:
            return
        if not wait([self._begun], _LONGEST_S).done:
            raise ArenaBrokenError(f"chunks are still being attached or detached after {_LONGEST_S:.0f} s")


def _carry_out(change: Callable[[], None], begun: "Future[None]") -> None:
    try:
        change()
    # Whatever it is: the background would only log it, and who waits for the end would wait for ever.
    except BaseException as error:
        begun.set_exception(error)
    else:
        begun.set_result(None)
