"""What the documents say and what the sources say."""

import ast
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.v1.elastic_kv.metrics import ElasticKVProm

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "patches" / "files" / "vllm"
ELASTIC = FILES / "v1" / "elastic_kv"
CONFIG = FILES / "config" / "elastic_kv.py"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATING = ROOT / "docs" / "operating.md"


def first_column(document: Path, heading: str) -> list[str]:
    """The code spans in the first column of the first table below a heading."""
    lines = document.read_text().splitlines()
    below = lines[next(n for n, line in enumerate(lines) if line.lstrip("#") == f" {heading}") + 1 :]
    start = next(n for n, line in enumerate(below) if line.startswith("|"))
    spans = []
    for line in below[start + 2 :]:
        if not line.startswith("|"):
            break
        spans += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return spans


def tables_below(document: Path, heading: str) -> list[list[str]]:
    """First-column code spans of each table below a heading, up to the next heading of its level."""
    lines = document.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.lstrip("#") == f" {heading}")
    level = len(lines[start]) - len(lines[start].lstrip("#"))
    tables: list[list[str]] = []
    inside = False
    for line in lines[start + 1 :]:
        if re.match(rf"#{{1,{level}}} ", line):
            break
        if line.startswith("|"):
            if not inside:
                tables.append([])
            tables[-1] += re.findall(r"`([^`]+)`", line.split(" | ")[0])
        inside = line.startswith("|")
    return tables


def fields_of(path: Path, name: str) -> list[str]:
    """The annotated fields of a class."""
    tree = ast.parse(path.read_text())
    cls = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return [n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def state_fields() -> set[str]:
    """The fields of `GET /elastic_kv`, nested ones with a dot."""
    tree = ast.parse((ELASTIC / "accounts.py").read_text())
    state = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "state")
    answer = next(node.value for node in ast.walk(state) if isinstance(node, ast.Return))
    found = set()
    for key, value in zip(answer.keys, answer.values, strict=True):
        if isinstance(value, ast.Dict):
            found |= {f"{key.value}.{inner.value}" for inner in value.keys}
        else:
            found.add(key.value)
    return found


def metric_names() -> set[str]:
    """The metrics as `/metrics` shows them, those of a prefill reserve among them."""
    registry = CollectorRegistry()
    kinds = [partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)]
    ElasticKVProm(SimpleNamespace(elastic_kv_config=ElasticKVConfig(policy="adaptive")), [], {}, *kinds)
    return {metric.name + "_total" * (metric.type == "counter") for metric in registry.collect()}


def templates() -> list[str]:
    """Every text in the sources, with `…` for what is filled in."""
    found = []
    for path in [CONFIG, *ELASTIC.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.,0-9]*[a-z]|%#x", "…", node.value))
    return found


def says(message: str) -> bool:
    """Whether the sources can produce a message whose variable parts are `…`."""
    wanted = _pattern(message)
    for text in templates():
        long_enough = len(text.replace("…", "")) > 12  # a template of mere punctuation fits everything
        if wanted.search(text) or (long_enough and _pattern(text).search(message)):
            return True
    return False


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.strip("… ").split("…"))), re.DOTALL)
