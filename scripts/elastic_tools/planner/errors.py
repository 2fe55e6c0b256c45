"""What the planner says about input that it cannot use."""

import difflib
from collections.abc import Iterable


class PlanError(Exception):
    """Input that makes no plan. The message is one sentence that names the value and what would be right."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """The choice that reads most like ``value``."""
    names = list(choices)
    lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(value.lower(), list(lower), n=1, cutoff=0)
    return lower[close[0]] if close else names[0]


LEAST, MOST = 1e-6, 1e9  # what a rate, a latency or a price can be; beyond them sums overflow


def positive(name: str, value: float) -> float:
    """``value``, if it is a number above zero that sums can be made of. Raises ``PlanError``."""
    if not value > 0 or value == float("inf"):
        raise PlanError(f"{name} is {value:g}, and must be a number above 0.")
    if not LEAST <= value <= MOST:
        raise PlanError(f"{name} is {value:g}; the nearest that is planned for is {min(max(value, LEAST), MOST):g}.")
    return value


def sentence(error: object, most: int = 600) -> str:
    """A message on one line; the middle of a very long one, which repeats what was given, is left out."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
