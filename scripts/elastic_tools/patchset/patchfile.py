"""Reads one patch as `git format-patch` writes it: a mail header, a message, and unified diffs."""

import email.header
import email.parser
import re
from dataclasses import dataclass, field
from pathlib import Path

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DIFF = re.compile(rb"diff --git a/(\S+) b/(\S+)$")
_CUT = re.compile(rb"^(?:---$|diff --git )", re.MULTILINE)  # where `git am` takes the message to end
_STATUS = re.compile(r"(not sent|sent https?://\S+|inappropriate \(\S.*\))$")
_KINDS = {
    b"new file mode ": "add",
    b"deleted file mode ": "delete",
    b"rename from ": "rename",
    b"copy from ": "copy",
    b"old mode ": "mode",
    b"GIT binary patch": "binary",
    b"Binary files ": "binary",
}


class Malformed(Exception):
    """The text is not a patch; the message says why, without the file's name."""


@dataclass
class Change:
    """What a patch does to one file. ``hunks`` are first lines in the old file."""

    path: str
    kind: str = "edit"
    hunks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Patch:
    """One patch of the series; ``data`` is the file as it is."""

    name: str
    data: bytes
    subject: str
    message: str
    changes: list[Change]

    @property
    def paths(self) -> list[str]:
        """The files that it touches, in the order of the patch."""
        return [change.path for change in self.changes]

    def header_problems(self) -> list[str]:
        """What the header lacks: each patch says what it does, why, and how upstream stands to it."""
        problems = [] if self.subject else ["has no subject"]
        for word in ("What", "Why"):
            if not re.search(rf"(?:\A|\n\s*\n){word}:[ \t]*\n?[ \t]*\S", self.message):
                problems.append(f'has no "{word}:" paragraph')
        found = re.findall(r"^Upstream-Status:[ \t]*(.*?)[ \t]*$", self.message, re.MULTILINE)
        if len(found) != 1:
            problems.append(f'has {len(found) or "no"} "Upstream-Status:" line{"s" if len(found) > 1 else ""}')
        elif not _STATUS.match(found[0]):
            problems.append(
                f'has Upstream-Status "{found[0]}", not "not sent", "sent <url>" or "inappropriate (<reason>)"'
            )
        return problems


def read(path: Path) -> Patch:
    """Reads the patch at ``path``; raises :class:`Malformed`."""
    return parse(path.name, path.read_bytes())


def parse(name: str, data: bytes) -> Patch:
    """Parses ``data``; raises :class:`Malformed`."""
    if not data.startswith(b"From "):
        raise Malformed('does not begin with "From ", as format-patch writes it')
    _, _, mail = data.partition(b"\n")
    head, gap, rest = mail.partition(b"\n\n")
    cut = _CUT.search(rest)
    if not gap or not cut:
        raise Malformed("has no diff")
    message = rest[: cut.start()]
    headers = email.parser.BytesParser().parsebytes(head + b"\n\n", headersonly=True)
    subject = str(email.header.make_header(email.header.decode_header(headers.get("Subject", ""))))
    subject = re.sub(r"^\[PATCH[^\]]*\]\s*", "", re.sub(r"\s*\n\s*", " ", subject))
    start = len(data) - len(rest) + len(message)
    changes = _changes(data[start:].split(b"\n"), data[:start].count(b"\n"))
    if not changes:
        raise Malformed("changes no file")
    return Patch(name, data, subject, message.decode("utf-8", "replace"), changes)


def _changes(lines: list[bytes], offset: int) -> list[Change]:
    changes: list[Change] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith(b"diff --git "):
            match = _DIFF.match(line)
            if not match or b".." in match[2].split(b"/"):
                raise Malformed(f"names a file with spaces or odd characters in line {offset + index}")
            changes.append(Change(match[2].decode("ascii", "replace")))
        elif line == b"-- ":
            break
        elif line.startswith(b"@@"):
            match = _HUNK.match(line)
            if not match or not changes:
                raise Malformed(f"has a broken hunk in line {offset + index}")
            changes[-1].hunks.append(int(match[1]))
            index = _skip_hunk(lines, index, match, offset)
        elif changes:
            for start, kind in _KINDS.items():
                if line.startswith(start):
                    changes[-1].kind = kind
    return changes


def _skip_hunk(lines: list[bytes], index: int, match: re.Match[bytes], offset: int) -> int:
    """The line behind the hunk that ``match`` opens; checks that it is as long as it says."""
    old, new = (int(count) if count else 1 for count in (match[2], match[4]))
    first = index
    while old > 0 or new > 0:
        sign = lines[index][:1] if index < len(lines) else b"end"
        if sign not in (b" ", b"", b"-", b"+", b"\\") or (sign == b"" and index == len(lines) - 1):
            raise Malformed(f"has a hunk that is shorter than it says in line {offset + first}")
        old -= sign in (b" ", b"", b"-")
        new -= sign in (b" ", b"", b"+")
        index += 1
    if old < 0 or new < 0 or (index < len(lines) and lines[index][:1] in (b"+", b" ")):
        raise Malformed(f"has a hunk that is longer than it says in line {offset + first}")
    if lines[index : index + 1] and lines[index][:1] == b"-" and lines[index] != b"-- ":
        raise Malformed(f"has a hunk that is longer than it says in line {offset + first}")
    return index
