"""vLLM's own parser takes the file that ``emit`` writes."""

import json

import pytest
from elastic_tools.planner.__main__ import main
from elastic_tools.planner.checkpoint import load_model
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


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
    path = tmp_path / "serve.yaml"
    path.write_text(capsys.readouterr().out)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--config", str(path)])
    engine = EngineArgs.from_cli_args(given)
    assert engine.model == load_model(arguments[1]).hub
    assert {name: getattr(engine, name) for name in expected} == expected
    assert engine.max_num_batched_tokens >= engine.max_num_seqs
    elastic = engine.elastic_kv_config
    assert (elastic is not None) is ("--elastic" in arguments)
    if elastic is not None:
        policy = elastic["policy"] if isinstance(elastic, dict) else elastic.policy
        assert json.loads(json.dumps(policy)) == "on-demand"
