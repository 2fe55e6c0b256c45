# SPDX-License-Identifier: Apache-2.0
"""What happens to SIGTERM where an engine connects to Ray."""

import functools
import signal
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def keeps_sigterm(connect: Callable[P, R]) -> Callable[P, R]:
    """Leaves a handler of SIGTERM as it was before the call, since `ray.init` puts its own there.

    The handler of an engine's process lets requests that are under way finish (`--shutdown-timeout`); Ray's ends the
    process. Where there was none, Ray's stays. In a thread other than the main one Ray sets none, and nobody may.
    """

    @functools.wraps(connect)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before = signal.getsignal(signal.SIGTERM)
        try:
            return connect(*args, **kwargs)
        finally:
            if callable(before) and signal.getsignal(signal.SIGTERM) is not before:
                signal.signal(signal.SIGTERM, before)

    return call
