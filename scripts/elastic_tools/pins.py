"""Paths of the repository and the versions in ``configs/pins.toml``."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
TREE = ROOT / ".tree"


def pins() -> dict[str, Any]:
    """The parsed pins file. Raises ``FileNotFoundError`` where the checkout is incomplete."""
    with open(ROOT / "configs" / "pins.toml", "rb") as file:
        return tomllib.load(file)
