"""Where things are, and which release is pinned, for one checkout of this repository."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from .errors import Refusal
from .series import Series


@dataclass(frozen=True)
class Project:
    """A checkout of this repository at ``root``, with the release that it pins."""

    root: Path
    version: str
    sdist: str
    sha256: str

    @classmethod
    def at(cls, root: Path) -> "Project":
        """Reads ``configs/pins.toml`` under ``root``."""
        file = root / "configs" / "pins.toml"
        try:
            vllm = tomllib.loads(file.read_text())["vllm"]
            return cls(root, vllm["version"], vllm["sdist"], vllm["sdist_sha256"])
        except FileNotFoundError:
            raise Refusal(f"{file} is missing: this checkout is not complete.") from None
        except (tomllib.TOMLDecodeError, KeyError) as fault:
            raise Refusal(f"{file} cannot be used: {fault}.") from None

    @property
    def series(self) -> Series:
        """The series of this checkout."""
        return Series(self.root / "patches")

    @property
    def cache(self) -> Path:
        """Downloads and what was unpacked from them."""
        return self.root / ".cache"

    @property
    def source(self) -> Path:
        """Upstream's source, as released; made by `fetch`."""
        return self.cache / f"vllm-{self.version}"

    @property
    def tree(self) -> Path:
        """The editable upstream checkout; made by `tree`."""
        return self.root / ".tree"
