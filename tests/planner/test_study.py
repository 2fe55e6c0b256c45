"""Paper B's study and the accuracy of the planner."""

import json

import pytest
from elastic_tools.planner import accuracy, claims, study
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan
from elastic_tools.planner.hardware import gpu

from .test_cli import main


@pytest.fixture(scope="module")
def one():
    return study.study_one(("Llama-3.1-8B", "L40S"))


def test_a_comparison_by_hand(one):
    _, pairs = one
    pair = next(p for p in pairs if (p.cache, p.context, p.relief) == ("fp8", 8192, 1.5))
    plain = Plan(load_model("Llama-3.1-8B"), gpu("L40S"), cache_dtype("bf16"))
    held = study.fits(plain, 8192)
    assert pair.requests == int(1.5 * held)
    packed = Plan(plain.model, plain.gpu, cache_dtype("fp8"))
    assert pair.compressed_dollars == study.price(packed, 8192, pair.requests)[2]
    assert pair.gap == pair.wider_dollars / pair.compressed_dollars
    assert (pair.fewest, pair.tp > 1) == (1, True)


def test_both_ways_hold_what_is_asked(one):
    _, pairs = one
    for pair in pairs:
        for tp, cache in ((pair.tp, "bf16"), (pair.fewest, pair.cache)):
            plan = Plan(load_model(pair.model), gpu(pair.gpu), cache_dtype(cache), tp)
            assert study.fits(plan, pair.context) >= pair.requests


def test_where_bytes_are_what_counts_compression_is_never_dearer(one):
    assert all(pair.gap > 1 for pair in one[1] if pair.ideal or pair.cache == "fp8")


def test_the_order_does_not_depend_on_the_processes(monkeypatch, one):
    monkeypatch.setattr(study, "MODELS", ("Llama-3.1-8B",))
    monkeypatch.setattr(study, "gpus", lambda: ["L40S"])
    assert study.sweep(workers=1) == (one[0], one[1])


def test_every_claim_has_data_and_a_verdict(one):
    rows = claims.claim_rows(*one)
    assert len(rows) >= 5
    assert all(len(row) == 3 and all(row) for row in rows)
    assert "Claim: No crossover" in claims.terminal(*one)


def test_the_arithmetic_of_the_study_is_near_the_simulation():
    for row in study.check():
        assert row["arithmetic_tokens_per_s"] == pytest.approx(row["simulated_tokens_per_s"], rel=0.15), row["plan"]


def test_every_measurement_has_a_source_that_can_be_opened():
    runs = accuracy.runs()
    assert sum(len(run["measured"]) for run in runs) >= 30
    assert all(run["source"].startswith("https://") for run in runs)
    assert {run.get("use", "hold-out") for run in runs} <= {"hold-out", "calibration"}


def test_errors_by_hand():
    points = [
        accuracy.Point({"gpu": "H100", "prompt": 1}, "tpot_p50_ms", 10, estimated, True) for estimated in (9, 11, 14)
    ]
    row = next(row for row in accuracy.summary(points) if row[0] == "hold-out, all")
    assert row == ["hold-out, all", "3", "10.0%", "40.0%", "+10.0%"]


def test_an_unknown_field_of_a_measurement(tmp_path):
    (tmp_path / "x.toml").write_text('[[run]]\nsources = "x"\n')
    with pytest.raises(PlanError, match="'sources'"):
        accuracy.runs(tmp_path)


def test_accuracy_writes_page_data_and_picture(tmp_path, capsys):
    assert main(["accuracy", "--output", str(tmp_path)]) == 0
    assert "hold-out, all" in capsys.readouterr().out
    rows = json.loads((tmp_path / "planner-accuracy.json").read_text())
    assert len(rows) == sum(len(run["measured"]) for run in accuracy.runs())
    assert "| hold-out, all" in (tmp_path / "planner-accuracy.md").read_text()
    assert (tmp_path / "planner-accuracy.png").read_bytes().startswith(b"\x89PNG")
