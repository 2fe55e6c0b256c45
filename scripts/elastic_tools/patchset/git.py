"""Runs git so that neither the user's settings nor an enclosing repository can change the result."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from .errors import Refusal

AUTHOR = "Elastic KV authors"
EMAIL = "authors@elastic-kv.invalid"
DATE = "2026-01-01T00:00:00+00:00"

# Settings of every call: content is bytes, never converted, and diffs always look the same.
_SETTINGS = {
    "advice.detachedHead": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "true",
    "core.safecrlf": "false",
    "commit.gpgSign": "false",
    "diff.algorithm": "myers",
    "diff.suppressBlankEmpty": "false",
    "gc.auto": "0",
    "init.defaultBranch": "main",
    "mailinfo.scissors": "false",
    "tag.gpgSign": "false",
}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without any git variable, with fixed identity, language and time zone."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": AUTHOR, f"GIT_{who}_EMAIL": EMAIL, f"GIT_{who}_DATE": DATE}
    return env | dict(extra or {})


def run(
    *args: str, cwd: Path, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs ``git args`` in ``cwd``, which must be the top of its own repository; never raises on git's own failure."""
    settings = [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]
    settings += ["-c", f"safe.directory={cwd}"]
    where = {"GIT_CEILING_DIRECTORIES": str(cwd.parent)} | dict(env or {})
    try:
        return subprocess.run(
            ["git", *settings, *args], cwd=cwd, input=stdin or b"", capture_output=True, env=environment(where)
        )
    except FileNotFoundError:
        raise Refusal("git is not installed, or not on PATH.") from None


def output(*args: str, cwd: Path, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> bytes:
    """What ``git args`` prints; raises :class:`Refusal` with git's last line where it fails."""
    result = run(*args, cwd=cwd, stdin=stdin, env=env)
    if result.returncode:
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise Refusal(f"git {args[0]} failed in {cwd}: {lines[-1]}")
    return result.stdout


def init(directory: Path) -> None:
    """Makes ``directory`` a repository of its own, without templates or hooks."""
    output("init", "--quiet", "--template=", str(directory), cwd=directory)
    (directory / ".git" / "info").mkdir(exist_ok=True)


def commit_all(directory: Path, message: str) -> None:
    """Commits everything under ``directory``, ignored files too, with the fixed author and date."""
    output("add", "--all", "--force", ".", cwd=directory)
    output("commit", "--quiet", "--allow-empty", "--no-verify", "--message", message, cwd=directory)
