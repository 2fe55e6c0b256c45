"""The comparison of engines is fair, is between the engines it names, and judges by its own uncertainty."""

from collections import Counter
from itertools import pairwise

import pytest
from elastic_tools.bench import overhead, report
from elastic_tools.bench.arms import Arm, BenchError, Process, orders
from elastic_tools.bench.engine import prompts
from elastic_tools.bench.paired import ratio


@pytest.mark.parametrize("arms", [2, 3, 4])
def test_each_order_is_followed_by_its_mirror_image(arms):
    found = orders(arms, 12)
    assert all(found[index + 1] == found[index][::-1] for index in range(0, 12, 2))


def test_three_arms_take_every_place_equally_often_and_follow_each_other_equally_often():
    found = orders(3, 12)
    places = Counter((arm, place) for order in found for place, arm in enumerate(order))
    behind = Counter(pair for order in found for pair in pairwise(order))
    assert set(places.values()) == {4}
    assert set(behind.values()) == {4}


def test_the_ratio_is_taken_within_each_round():
    # A machine that slows down by half touches both arms, so the ratio stays.
    found = ratio([99.0, 49.5, 99.0, 49.5, 99.0], [100.0, 50.0, 100.0, 50.0, 100.0])
    assert found.median == pytest.approx(0.99)
    assert found.interval == pytest.approx((0.99, 0.99))


@pytest.mark.parametrize(
    ("rounds", "more_is_better", "verdict"),
    [
        ([0.999, 1.0, 1.001, 1.0, 0.998, 1.002], True, "holds"),
        ([1.05, 1.06, 1.05, 1.06, 1.05, 1.06], True, "holds"),
        ([0.95, 0.96, 0.95, 0.96, 0.95, 0.96], True, "broken"),
        ([0.95, 1.05, 0.96, 1.04, 0.97, 1.03], True, "undecided"),
        ([1.05, 1.06, 1.05, 1.06, 1.05, 1.06], False, "broken"),
        ([0.95, 0.96, 0.95, 0.96, 0.95, 0.96], False, "holds"),
        ([0.999, 1.0, 1.001, 1.0, 0.998, 1.002], False, "holds"),
    ],
)
def test_the_verdict_looks_at_losses_and_at_the_interval(rounds, more_is_better, verdict):
    assert ratio(rounds, [1.0] * len(rounds)).verdict(0.01, more_is_better) == verdict


def test_no_two_prompts_are_alike():
    texts = [text for number in range(3) for text in prompts(number, 16)]
    assert len(set(texts)) == 48


def test_different_tokens_are_an_error_that_names_arm_round_and_request():
    results = {"unpatched": {"output": [[1, 2], [3]]}, "patched, off": {"output": [[1, 2], [4]]}}
    with pytest.raises(BenchError, match=r"round 7: 'patched, off' and 'unpatched' .* requests \[1\]"):
        overhead.check_same_output(7, results)


def test_an_arm_refuses_to_run_as_another_engine(monkeypatch, tmp_path):
    monkeypatch.setattr("elastic_tools.bench.arms.LOGS", tmp_path)
    process = Process(Arm("mislabelled", patched=True), {}, {"PYTHONPATH": str(Arm("", patched=False).package.parent)})
    try:
        with pytest.raises(BenchError, match=r"(?s)'mislabelled' ended with 1; .*vllm was imported from"):
            process.ready()
    finally:
        process.stop()


def test_the_report_says_what_was_found(tmp_path):
    settings = overhead.Settings(6, 1, 4, 8, 2**29, 2**31, control=True)

    def arm(speed: float) -> dict:
        one = {"tokens_per_s": speed, "tpot_ms": 100 / speed, "idle_s": 2.0, "idle_cpu_s": 0.01, "others_cores": 0.02}
        return {"versions": {"vllm": "1"}, "rounds": [one] * 7}

    measured = {arm_.name: arm(10.0) for arm_ in settings.arms}
    machine = dict.fromkeys(["date", "command", "commit", "cpu", "cores", "memory_gib", "kernel", "python"], "this")
    comparison = overhead.compare(measured, settings.warm_up)
    written = report.write(settings, machine, measured, comparison, tmp_path)
    page = written[0].read_text()
    assert "The bar of 1% holds" in page
    assert "| patched, off | throughput | 1.0000 | 1.0000 to 1.0000 |" in page
    assert [path.name for path in written] == ["off-overhead.md", "off-overhead.json", "off-overhead.png"]
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_a_busy_machine_is_not_judged():
    comparison = {"patched, off": {"tokens_per_s": ratio([0.5] * 5, [1.0] * 5)}}
    assert "Not judged: other work kept 1.5 cores busy" in report.verdict(comparison, others=1.5)
    assert report.table(comparison, others=1.5).endswith("| - |")
    assert "is broken" in report.verdict(comparison, others=0.0)
