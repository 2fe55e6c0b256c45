"""Paper B's study and the accuracy of the planner."""

import json

import pytest
from elastic_tools.planner import accuracy, claims, study, study_page
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan
from elastic_tools.planner.hardware import gpu

from .test_cli import main


@pytest.fixture(scope="module")
def one():
    return study.study_one(("Llama-3.1-8B", "L40S"))


class OneMillisecond:
    """1 ms a step, and 1 ms for every 1,000 tokens of a prompt."""

    def step(self, decoding, context, chunks):
        return 1 + sum(size for size, _ in chunks) / 1000


def test_a_price_by_hand(monkeypatch):
    """8,192 tokens are a prompt of 7,168 and an answer of 1,024. Ten requests leave 2,038 tokens of a step of 2,048 to
    prompts, so one takes 7,168 / 2,038 steps that are 2.038 ms longer each: 7.168 ms. In 1,024 x 1 + 10 x 7.168 ms ten
    answers are made: 9,345.79 tokens a second, for $1.332 an hour.
    """
    monkeypatch.setattr(study, "times_of", lambda _: OneMillisecond())
    plan = Plan(load_model("Llama-3.1-8B"), gpu("L40S"), cache_dtype("bf16"))
    tokens, tpot, dollars = study.price(plan, 8192, 10)
    assert tokens == pytest.approx(9345.79, abs=0.01)
    assert tpot == pytest.approx(1 + 9 * 7.168 / 1024)
    assert dollars == pytest.approx(0.039590, abs=1e-6)


def test_a_gap_is_the_ratio_of_the_costs():
    pair = study.Pair("m", "H100", 8192, "fp8", False, 1.5, 1, 2, 10, 2.0, 3.0, 2.5, 20.0, 15.0)
    assert pair.gap == 1.5


def test_a_comparison_asks_for_what_the_relief_says(one):
    """16 bit on an L40S: (blocks - 1) / 512 requests of 8,192 tokens, rounded after the relief of 1.5."""
    _, pairs = one
    pair = next(p for p in pairs if (p.cache, p.context, p.relief) == ("fp8", 8192, 1.5))
    held = Plan(load_model("Llama-3.1-8B"), gpu("L40S"), cache_dtype("bf16")).memory().blocks - 1
    assert pair.requests == int(1.5 * held / 512)
    assert (pair.fewest, pair.tp > 1) == (1, True)


def test_no_context_is_beyond_the_model():
    cells, pairs = study.study_one(("Llama-2-7B", "L40S"))
    assert {each.context for each in cells} == {2048, 4096}
    assert {each.context for each in pairs} <= {2048, 4096}


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
    assert "Claim: No crossover" in study_page.terminal(*one)


def test_the_arithmetic_of_the_study_is_near_the_simulation():
    for row in study.check():
        assert row["arithmetic_tokens_per_s"] == pytest.approx(row["simulated_tokens_per_s"], rel=0.15), row["plan"]


def test_every_measurement_has_a_source_that_can_be_opened():
    runs = accuracy.runs()
    assert sum(len(run["measured"]) for run in runs) >= 30
    assert all(run["source"].startswith("https://") for run in runs)
    assert {run.get("use", "hold-out") for run in runs} <= {"hold-out", "calibration"}


def test_errors_by_hand():
    run = {"gpu": "H100", "engine": "vLLM 1", "prompt": 1}
    points = [accuracy.Point(run, "tpot_p50_ms", 10, estimated, inside) for estimated, inside in
              ((9, True), (11, True), (14, False))]  # fmt: skip
    rows = {row[0]: row[1:] for row in accuracy.summary(points)}
    assert rows["hold-out, all"] == ["3", "10.0%", "40.0%", "+10.0%"]
    assert rows["times, inside the measured tables"] == ["2", "10.0%", "10.0%", "+0.0%"]
    assert rows["times, outside of them"] == ["1", "40.0%", "40.0%", "+40.0%"]


def test_published_capacities():
    """The tokens of cache that vLLM logged, on cards whose settings are known, within 2%."""
    runs = [run for run in accuracy.runs() if "38479" in run["source"] and "prompt" not in run]
    assert {run["measured"]["cache_tokens"] for run in runs} == {417_440, 1_431_184}
    for run in runs:
        assert accuracy.estimates(run)["cache_tokens"] == pytest.approx(run["measured"]["cache_tokens"], rel=0.02)


def test_points_of_at_least_three_gpus_and_five_models():
    timed = [run for run in accuracy.runs() if "prompt" in run]
    assert {run["gpu"] for run in timed} == {"A100", "H100", "H200", "L40S"}
    assert len({run["model"] for run in timed}) >= 5


def test_what_is_inside_the_tables():
    run = {"gpu": "H100", "model": "Llama-3.1-8B", "prompt": 8192, "measured": {}}
    assert accuracy.interior(run)
    assert not accuracy.interior(run | {"prompt": 8193})  # is cut
    assert not accuracy.interior(run | {"cache": "int4"})
    assert not accuracy.interior(run | {"weights": "int4"})


def test_an_unknown_field_of_a_measurement(tmp_path):
    (tmp_path / "x.toml").write_text('[[run]]\nsources = "x"\n')
    with pytest.raises(PlanError, match="'sources'"):
        accuracy.runs(tmp_path)


def test_accuracy_writes_page_data_and_picture(tmp_path, capsys, monkeypatch):
    few = [run for run in accuracy.runs() if run.get("requests", 1) <= 16]
    monkeypatch.setattr(accuracy, "runs", lambda: few)
    assert main(["accuracy", "--output", str(tmp_path)]) == 0
    assert "hold-out, all" in capsys.readouterr().out
    rows = json.loads((tmp_path / "planner-accuracy.json").read_text())
    assert len(rows) == sum(len(run["measured"]) for run in few)
    assert "| hold-out, all" in (tmp_path / "planner-accuracy.md").read_text()
    assert (tmp_path / "planner-accuracy.png").read_bytes().startswith(b"\x89PNG")
