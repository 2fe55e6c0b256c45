"""Fields, metrics, routes and messages in the documents are those of the sources, and the other way round."""

import json
import re

import pytest
from elastic_tools.pins import pins

from .facts import (
    CONFIG,
    DOCUMENTS,
    ELASTIC,
    FILES,
    OPERATING,
    ROOT,
    fields_of,
    first_column,
    metric_names,
    says,
    state_fields,
    tables_below,
)

README = ROOT / "README.md"


def test_config_fields():
    fields = fields_of(CONFIG, "ElasticKVConfig")
    assert first_column(OPERATING, "Switching it on") == fields
    assert first_column(README, "Configuration") == fields


def test_resize_fields():
    request, answer, statuses = tables_below(OPERATING, "`POST /elastic_kv/resize`")
    assert sorted(request) == sorted(fields_of(ELASTIC / "resize.py", "ResizeRequest"))
    named = {"before": "from", "after": "to"}
    result = [named.get(name, name) for name in fields_of(ELASTIC / "resize.py", "ResizeResult")]
    outcomes = {"done", "partial", "refused"}
    assert [name for name in answer if name not in outcomes] == result
    assert not set(statuses) - outcomes


def test_state_fields():
    documented = set()
    for name in first_column(OPERATING, "`GET /elastic_kv`"):
        documented.add(name if not name.startswith(".") else f"transactions{name}")
    ranks = {name.removeprefix("ranks[].") for name in documented if name.startswith("ranks[].")}
    transactions = {name.removeprefix("transactions.") for name in documented if name.startswith("transactions.")}
    plain = {name for name in documented if "[]" not in name and not name.startswith("transactions.")}
    assert plain | {"ranks", "transactions"} == state_fields()
    internal = {"elapsed_ms", "busy", "unreleased_bytes"}
    assert ranks == set(fields_of(ELASTIC / "worker_side.py", "RankState")) - internal
    assert transactions == {"done", "partial", "refused", "failed"}


def test_metrics():
    assert set(first_column(OPERATING, "Metrics")) == metric_names()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_named_anywhere(document):
    named = set(re.findall(r"vllm:elastic_kv_[a-z_]+", document.read_text())) - {"vllm:elastic_kv_"}
    assert named <= metric_names()


def test_routes():
    source = (ELASTIC / "api_router.py").read_text()
    served = {
        f"{verb.upper()} {path}" for verb, path in re.findall(r'_router\.(get|post|put|delete)\("([^"]+)"', source)
    }
    for document in (README, OPERATING):
        named = set(re.findall(r"`((?:GET|POST|PUT|DELETE) /elastic_kv[a-z_/]*)`", document.read_text()))
        assert named == served, document.name


def test_status_codes():
    source = (ELASTIC / "api_router.py").read_text()
    section = OPERATING.read_text().split("### `POST /elastic_kv/resize`")[1].split("###")[0]
    documented = set(re.findall(r"^\| (\d{3}) \|", section, re.MULTILINE))
    used = {
        {"BAD_REQUEST": "400", "UNAUTHORIZED": "401", "CONFLICT": "409", "OK": "200"}.get(name, "413")
        for name in re.findall(r"HTTPStatus\.([A-Z_]+)", source)
    }
    assert documented == used | {"404"}  # 404 is the answer of a server without the route


@pytest.mark.parametrize("heading", ["The server does not start", "A resize does not do what was asked"])
def test_messages(heading):
    table = OPERATING.read_text().split(f"### {heading}")[1].split("\n#")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    spans = [span for row in rows if "vLLM's own" not in row[1] for span in re.findall(r"`([^`]+)`", row[0])]
    messages = [span for span in spans if " " in span and not span.startswith("Authorization")]
    assert messages
    assert [message for message in messages if not says(message)] == []


def test_what_works_is_what_is_tested():
    """The tests that the tables name exist, and each cell is named."""
    section = OPERATING.read_text().split("## What works with it")[1].split("\n## ")[0]
    source = (ROOT / "tests" / "models" / "test_cells.py").read_text()
    cells = re.findall(r'^    "([^"]+)": Cell\(', (ROOT / "tests" / "models" / "cells.py").read_text(), re.MULTILINE)
    named = re.findall(r"`(test_\w+)(?:\[([^]]+)\])?`", section)
    assert {test for test, _ in named} <= set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    assert sorted(cell for _, cell in named if cell) == sorted([*cells, "full attention"])  # named for its dtype too
    for path in re.findall(r"`(tests/[\w/.]+)`", section):
        assert (ROOT / path).exists(), path


def test_a_message_that_no_source_has():
    assert not says("The elastic KV cache is delighted to see …")


def test_modules():
    documented = first_column(ROOT / "docs" / "architecture.md", "Modules")
    there = {str(path.relative_to(FILES)) for path in FILES.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(documented) == sorted(there)


def test_the_picture_in_the_readme_is_of_a_run_that_passed():
    report = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())
    summary = report["summary"]
    assert report["versions"]["vllm"].split("+")[0] == pins()["vllm"]["version"]
    assert summary["requests_sent"] > 0
    assert summary["requests_failed"] == 0
    assert summary["largest_difference_mib"] <= summary["chunk_mib"] + summary["noise_mib"]


def test_scenarios_name_tests_that_exist():
    rows = [line for line in (ROOT / "docs" / "scenarios.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            assert re.search(rf"def {test}\(", (ROOT / file).read_text()), f"{file}::{test}"
