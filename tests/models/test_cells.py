"""What the elastic cache works with: models, features and KV dtypes, each on a real engine.

Where both work, the answers of a cache that is resized before every step equal those of a fixed one.
`docs/operating.md` has the table; `tests/config` shows more settings that are refused.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers import engine_environment

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parents[1]
MODELS = {
    "full attention": [["FullAttentionSpec", 32]],
    "sliding window": [["SlidingWindowSpec", 32]],
    "full attention and sliding window": [["SlidingWindowSpec", 32], ["FullAttentionSpec", 32]],
    "one group of both": [["FullAttentionSpec", 32]],
    "shared-KV layers": [["SlidingWindowSpec", 32], ["FullAttentionSpec", 32]],
    "groups of different block sizes": [["SlidingWindowSpec", 64], ["FullAttentionSpec", 32]],
    "MLA": [["MLAAttentionSpec", 16]],
}
FEATURES = [
    "LoRA",
    "ngram speculation",
    "draft model",
    "structured output",
    "several outputs",
    "seed, prompts in chunks",
    "prompt logprobs",
    "no prefix caching",
    "KV events",
    "KV events of two groups",
]
DTYPES = ["bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"]
FP8_NEEDS = {"avx512f", "amx_tile"}  # one of them, for upstream's attention on a CPU
REFUSED = {
    "Mamba": "does not support state-space (Mamba) layers yet",
    "attention and Mamba": "does not support state-space (Mamba) layers yet",
    "mixed precision": "does not support KV caches of different precision in one model yet",
    "KV connector": "does not work with a KV connector (--kv-transfer-config), which may hold on to addresses",
    "native offload": "does not work with --kv-offloading-size, which adds a KV connector",
}


WITHOUT_PREEMPTION = {"LoRA"}  # see its cell


@pytest.fixture(scope="session")
def ran(request, tmp_path_factory):
    """What the cells came to that are tested in this session, from one process that ran them all."""
    items = [item for item in request.session.items if "ran" in getattr(item, "fixturenames", ())]
    names = list(dict.fromkeys(item.callspec.params["cell"] for item in items))
    command = [sys.executable, Path(__file__).with_name("cells.py"), tmp_path_factory.mktemp("models"), *names]
    environment = engine_environment() | {"PYTHONPATH": f"{TESTS.parent / 'scripts'}:{TESTS}"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stderr[-6000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"cell"')]
    return {line.pop("cell"): line for line in lines}


@pytest.fixture
def fixed_and_elastic(ran, cell):
    """Both engines' reports, where both answered and the same."""
    fixed, elastic = ran[cell]["fixed"], ran[cell]["elastic"]
    for engine in (fixed, elastic):
        assert "error" not in engine, engine["traceback"]
        assert len(engine["answers"]) == 10
    for name, answer in fixed["answers"].items():
        assert elastic["answers"][name]["outputs"] == answer["outputs"], name
    assert elastic["groups"] == fixed["groups"]
    print(cell, {name: elastic[name] for name in ("outcomes", "moved", "preempted", "evicted")})
    assert len(elastic["sizes"]) == elastic["steps"]
    assert elastic["outcomes"]["done"] >= 10
    assert min(elastic["sizes"]) * 4 < max(elastic["sizes"])
    assert elastic["moved"] > 0
    assert (elastic["preempted"] > 0) == (cell not in WITHOUT_PREEMPTION)
    return fixed, elastic


@pytest.mark.parametrize("cell", MODELS)
def test_models(fixed_and_elastic, cell):
    fixed, _ = fixed_and_elastic
    assert fixed["groups"] == MODELS[cell]


@pytest.mark.parametrize("cell", DTYPES)
def test_kv_dtypes(request, ran, cell):
    if cell.startswith("fp8") and FP8_NEEDS.isdisjoint(Path("/proc/cpuinfo").read_text().split()):
        reason = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
        assert [ran[cell][cache]["error"] for cache in ("fixed", "elastic")] == [reason, reason]
        pytest.skip(reason)
    request.getfixturevalue("fixed_and_elastic")


@pytest.mark.parametrize("cell", FEATURES)
def test_features(fixed_and_elastic, cell):
    fixed, elastic = fixed_and_elastic
    if check := CHECKS.get(cell):
        check(fixed, elastic)


def outputs(report):
    return [output for answer in report["answers"].values() for output in answer["outputs"].values()]


def adapters_differ(fixed, elastic):
    """Each is asked once in three times, and the three have a beginning in common."""
    assert len({tuple(tokens[:3]) for tokens, _, _ in outputs(fixed)}) == 10


def drafts_were_accepted(fixed, elastic):
    assert min(fixed["accepted"], elastic["accepted"]) > 10


def grammars_were_kept(fixed, elastic):
    texts = [text for _, text, _ in outputs(elastic)]
    objects = [json.loads(text) for text in texts if text.startswith("{")]
    assert {tuple(item) for item in objects} == {("colour", "round", "size")}
    assert len(objects) == 4
    others = [text for text in texts if not text.startswith("{")]
    assert all(re.fullmatch("[a-f]{3}-[0-9]{2,9}|one|three|eleven", text) for text in others), others


def several_and_different(fixed, elastic):
    counts = [len(answer["outputs"]) for answer in elastic["answers"].values()]
    assert sorted(set(counts)) == [1, 2, 3]
    texts = [text for _, text, _ in outputs(elastic)]
    assert len(set(texts)) == len(texts)


def logprobs_agree(fixed, elastic):
    for name, answer in fixed["answers"].items():
        for kind in ("prompt_logprobs", "logprobs"):
            assert elastic["answers"][name][kind] == pytest.approx(answer[kind], abs=1e-3), (name, kind)


def events_tell_what_is_cached(fixed, elastic):
    for report in (fixed, elastic):
        assert report["events"]["equal"], report["events"]
        assert report["events"]["kinds"]["BlockStored"] > 5
    assert elastic["events"]["kinds"]["BlockRemoved"] >= elastic["evicted"] > 0


CHECKS = {
    "LoRA": adapters_differ,
    "ngram speculation": drafts_were_accepted,
    "draft model": drafts_were_accepted,
    "structured output": grammars_were_kept,
    "several outputs": several_and_different,
    "prompt logprobs": logprobs_agree,
    "KV events": events_tell_what_is_cached,
    "KV events of two groups": events_tell_what_is_cached,
}


@pytest.mark.parametrize("cell", REFUSED)
def test_refused_at_start_up(ran, cell):
    assert f"The elastic KV cache {REFUSED[cell]}" in ran[cell]["elastic"]["error"]


@pytest.mark.parametrize("cell", ["sleep mode"])
def test_the_cpu_engine_itself_refuses(ran, cell):
    assert "Sleep mode is not supported on current platform" in ran[cell]["elastic"]["error"]


def test_all_kv_dtypes_of_the_cpu_engine_are_here():
    """`auto` is the model's own, and `fp8` another name of `fp8_e4m3`."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert set(CPUAttentionBackend.supported_kv_cache_dtypes) - {"auto", "fp8"} == {"fp8_e4m3", "fp8_e5m2"}
