"""The command line of ``scripts/patchset``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_tools.pins import ROOT

from . import check, fetch, install, mailbox, survey, target, tree
from .errors import Refusal
from .project import Project
from .series import atomic_write


def parser() -> argparse.ArgumentParser:
    """All verbs and options."""
    top = argparse.ArgumentParser(prog="patchset", description="Keep, check, apply and take back the patch series.")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("fetch", help="get upstream's pinned source release")
    make = verbs.add_parser("tree", help="make .tree, an upstream checkout with one commit per patch")
    make.add_argument("--force", action="store_true", help="drop what is in .tree and not in patches/")
    verbs.add_parser("refresh", help="write the commits of .tree back to patches/")
    verbs.add_parser("check", help="check the whole series")
    for verb, text in (
        ("apply", "apply the series to an installed vLLM or a source tree"),
        ("revert", "take the series out again"),
        (
            "status",
            "say how DIR stands to the series (exit code 0 applied, 3 not, 4 half, 5 modified, 6 another series)",
        ),
    ):
        command = verbs.add_parser(verb, help=text)
        command.add_argument("dir", type=Path, metavar="DIR", help="a venv, a site-packages folder or a source tree")
        if verb == "apply":
            command.add_argument("--force-version", action="store_true", help="take a fork: any version, moved lines")
        if verb == "status":
            command.add_argument("--json", action="store_true", help="print one JSON object")
    look = verbs.add_parser("survey", help="say, hunk by hunk, how the series stands to another release or a fork")
    look.add_argument("dir", type=Path, metavar="DIR", help="a venv, a site-packages folder or a source tree")
    look.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to standard output")
    export = verbs.add_parser("export", help="write everything as one mailbox for `git am`")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to standard output")
    return top


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs one verb on the checkout at ``root``; returns the exit code."""
    options = parser().parse_args(argv)
    try:
        code = _run(options, Project.at(root))
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        print(f"patchset: {refusal}", file=sys.stderr)
    except BrokenPipeError:  # the reader, `head` for one, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as fault:
        print(f"patchset: {fault.filename or 'the operation'}: {fault.strerror or fault}.", file=sys.stderr)
    except KeyboardInterrupt:
        print("patchset: interrupted; no file is half-written, and the same command may be run again.", file=sys.stderr)
    return 1


def _run(options: argparse.Namespace, project: Project) -> int:
    if options.verb == "fetch":
        print(f"vLLM {project.version} is in {fetch.ensure_source(project)}.")
    elif options.verb == "tree":
        print(tree.make(project, options.force))
    elif options.verb == "refresh":
        print(tree.refresh(project))
    elif options.verb == "check":
        return check.main(project)
    elif options.verb == "apply":
        print("\n".join(install.apply(project, options.dir, options.force_version)))
    elif options.verb == "revert":
        print("\n".join(install.revert(project, options.dir)))
    elif options.verb == "status":
        return _status(project, options)
    elif options.verb == "survey":
        other = target.find(options.dir)
        found = survey.survey(project.series, other)
        _write(survey.as_markdown(found, project.version, other.version or "of an unknown release").encode(), options)
    elif options.verb == "export":
        _write(mailbox.build(project.series), options)
    return 0


def _write(data: bytes, options: argparse.Namespace) -> None:
    if options.output:
        atomic_write(options.output, data)
    else:
        sys.stdout.buffer.write(data)


def _status(project: Project, options: argparse.Namespace) -> int:
    found = install.status(project, options.dir)
    if options.json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        print(
            f"{found.target.describe()}: {found.state}{'' if found.recorded or not found.applied else ' (no record)'}"
        )
        for path in found.files:
            print(f"  {path}")
        print(f"series {found.series}")
        if found.applied not in (None, found.series):
            print(f"applied {found.applied}")
    return install.EXIT_CODES[found.state]
