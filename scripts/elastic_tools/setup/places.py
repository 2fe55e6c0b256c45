"""Where things lie."""

import sys
from pathlib import Path

from elastic_tools.pins import CACHE, ROOT, VENV

__all__ = ["CACHE", "LOCKS", "PYTHON", "REQUIREMENTS", "ROOT", "STAMP", "UPSTREAM", "VENV", "site_packages"]

STAMP = VENV / "elastic-setup.json"
LOCKS = ROOT / "configs" / "locks"
REQUIREMENTS = ROOT / "configs" / "requirements"
UPSTREAM = CACHE / "upstream"
PYTHON = VENV / "bin" / "python"


def site_packages() -> Path:
    """The environment's package directory."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"
