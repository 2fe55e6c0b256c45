"""What the user sees: lines, and how far a step is."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

CLEAR_LINE = "\r\033[K"


class SetupError(Exception):
    """A failure that the message explains; no traceback is wanted."""


def say(text: str) -> None:
    """One line."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(position: Callable[[], str]) -> Iterator[None]:
    """Shows ``position()``: a line that changes on a terminal, a new line every 15 s elsewhere."""
    over = threading.Event()
    terminal = sys.stderr.isatty()
    begin = time.monotonic()

    def show() -> None:
        while not over.wait(0.25 if terminal else 15):
            text = f"  {position()}  {time.monotonic() - begin:.0f} s"[:100]
            sys.stderr.write(f"{CLEAR_LINE}{text}" if terminal else f"{text}\n")
            sys.stderr.flush()
        if terminal:
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def timed(name: str, run: Callable[[], None]) -> None:
    """Runs a step and says how long it took."""
    begin = time.monotonic()
    say(f"{name} ...")
    run()
    say(f"{name} done in {time.monotonic() - begin:.1f} s")
