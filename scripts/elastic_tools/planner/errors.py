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


def positive(name: str, value: float) -> float:
    """``value``, if it is a number above zero."""
    if not value > 0 or value != value or value == float("inf"):
        raise PlanError(f"{name} is {value:g}, and must be a number above 0.")
    return value
