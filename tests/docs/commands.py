"""The commands in the documents, and the table that says for each how it is run."""

import ast
import re
import tomllib
from pathlib import Path

from .facts import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = r"(?:make|git|vllm|curl|pip|docker|ray|apt|python3|docker/apply|\.venv/bin/pip|scripts/[a-z-]+)"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*{PROGRAMS}(?: .*)?")
TABLE = tomllib.loads((Path(__file__).parent / "commands.toml").read_text())


def commands(document: Path) -> set[str]:
    """Command lines of a document, each on one line: in fenced blocks, without comments and `$ `, and in code spans."""
    found = set()
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    text = document.read_text()
    for language, block in fence.findall(text):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if language:
            continue
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found |= {re.sub(r"\s{2,}#.*| +# .*", "", line).strip() for line in prompted or lines}
    found |= {re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", fence.sub("", text))}
    return {line for line in found if COMMAND.fullmatch(line)}


def written_in(test: str) -> set[str]:
    """The texts that are written in a test, `FILE::NAME`. Fails where there is no such test."""
    file, _, name = test.partition("::")
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    function = next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)
    return {node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
