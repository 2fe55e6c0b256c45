"""vLLM's own parser takes the file that ``emit`` writes."""

from dataclasses import replace

import pytest
from elastic_tools.planner.__main__ import main
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.emit import as_yaml
from elastic_tools.planner.estimate import Plan, estimate
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.workload import WORKLOADS
from pydantic import TypeAdapter
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

ONE = replace(WORKLOADS["chat"], concurrency=1)
PARSER = EngineArgs.add_cli_args(FlexibleArgumentParser())  # takes a second to build


def engine_of(text, path):
    """What the engine's own parser makes of the file."""
    path.write_text(text)
    return EngineArgs.from_cli_args(PARSER.parse_args(["--config", str(path)]))


def policy_of(engine):
    """The policy that the engine's own configuration class reads, or None without an elastic cache."""
    given = engine.elastic_kv_config
    return None if given is None else TypeAdapter(ElasticKVConfig).validate_python(given).policy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "Llama-3.1-8B"], {"tensor_parallel_size": 1, "quantization": None}),
        (["--model", "Llama-3.1-8B", "--weights", "fp8"], {"quantization": "fp8"}),
        (["--model", "Llama-3.1-70B", "--workload", "document"], {}),
        (["--model", "Llama-3.1-8B", "--elastic"], {}),
        (["--model", "Qwen3-8B", "--utilization", "0.85", "--cache", "int4"], {"gpu_memory_utilization": 0.85}),
    ],
)
def test_the_engine_takes_the_file(arguments, expected, tmp_path, capsys):
    assert main(["emit", *arguments, "--gpu", "H100", "--tp", "1", "2", "4"]) == 0
    engine = engine_of(capsys.readouterr().out, tmp_path / "serve.yaml")
    assert engine.model == load_model(arguments[1]).hub
    assert {name: getattr(engine, name) for name in expected} == expected
    assert engine.max_num_batched_tokens >= engine.max_num_seqs
    assert policy_of(engine) == ("on-demand" if "--elastic" in arguments else None)


@pytest.mark.parametrize("cache", ["auto", "fp8", "int8", "int4", "3bit"])
@pytest.mark.parametrize(
    ("elastic", "lend", "policy"),
    [(False, False, None), (True, False, "on-demand"), (False, True, "reclaim"), (True, True, "reclaim")],
)
def test_the_engine_takes_every_cache_with_every_policy(cache, elastic, lend, policy, tmp_path):
    found = estimate(Plan(load_model("Llama-3.1-8B"), gpu("H100"), cache_dtype(cache)), ONE)
    engine = engine_of(as_yaml(found, "m", ONE.length, None, elastic, lend), tmp_path / "serve.yaml")
    assert engine.kv_cache_dtype == cache_dtype(cache).name
    assert policy_of(engine) == policy
