"""The whole series as one mailbox, for a fork of vLLM to take with `git am`."""

from . import git, tree
from .series import Series, scratch_folder

_MESSAGE = """\
elastic-kv: add the new modules

What: all modules of the elastic KV cache that are files of their own. Nothing
calls them yet; the patches that follow do.

Why: new code is kept as plain source beside the patches, so that it can be
read, checked and tested where it lies.

Upstream-Status: not sent
"""


def build(series: Series) -> bytes:
    """One patch that adds the new files, then the series as it is."""
    patches = [(series.path / patch.name).read_bytes() for patch in series.patches()]
    files = series.files()
    if not files:
        return b"".join(patches)
    with scratch_folder() as scratch:
        git.init(scratch)
        git.commit_all(scratch, "base")
        git.output("tag", tree.BASE, cwd=scratch)
        for path, file in files.items():
            place = scratch / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
            place.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
        git.commit_all(scratch, _MESSAGE)
        return b"".join([*tree.exported(scratch).values(), *patches])
