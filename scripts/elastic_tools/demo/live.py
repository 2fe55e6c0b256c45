"""One line that changes on a terminal; plain lines elsewhere."""

import sys
import time

from tqdm import tqdm

PLAIN_EVERY = 10.0  # seconds between plain lines


class Live:
    """Shows how far the demonstration is. `show` may be called often."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(total=1, bar_format="{desc}", disable=not self._terminal, leave=False)
        self._shown_at = 0.0

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._terminal:
            self._bar.set_description_str(text[: (self._bar.ncols or 120) - 1])
        elif time.monotonic() - self._shown_at >= PLAIN_EVERY:
            self._shown_at = time.monotonic()
            print(f"demo: {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        tqdm.write(f"demo: {text}", file=sys.stderr)
        sys.stderr.flush()
