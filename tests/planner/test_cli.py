"""The command line: what it prints, what it writes, and how it refuses."""

import csv
import json
from pathlib import Path

import pytest
import yaml
from elastic_tools.planner.__main__ import main, parser

LLAMA = ["--model", "Llama-3.1-8B"]


def said(capsys):
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["estimate", "compare", "recommend", "emit", "regime", "study", "accuracy", "models"])
def test_every_verb_has_help(verb, capsys):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert "usage: scripts/plan" in said(capsys)


def test_help_has_examples_that_parse():
    lines = [line.split() for line in parser().epilog.splitlines() if line.strip().startswith("scripts/plan")]
    assert len(lines) >= 5
    for line in lines:
        parser().parse_args(line[1 : line.index(">")] if ">" in line else line[1:])


def test_estimate_shows_its_arithmetic(capsys):
    assert main(["estimate", *LLAMA, "--cache", "bf16"]) == 0
    text = said(capsys)
    assert "131,072 B a token" in text
    assert "79.22 x 0.92" in text
    assert "2,097,152 B a block of 16 tokens" in text
    assert "x 3,600) x 1,000,000" in text
    for label in ("[exact]", "[modelled]", "[interpolated]"):
        assert label in text


def test_json_says_what_the_text_says(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["estimate", *LLAMA, "--concurrency", "8", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    capsys.readouterr()
    assert main(["estimate", *LLAMA, "--concurrency", "8", "--json", "-"]) == 0
    assert json.loads(said(capsys)) == written
    memory = written["memory_bytes"]
    rest = sum(memory[part] for part in ("weights", "reserve", "graphs", "framework"))
    assert memory["requested"] - rest == memory["cache"]
    assert written["blocks"] == memory["cache"] // memory["per_block"]
    assert written["concurrency"] == 8
    assert set(written["sources"].values()) <= {"measured", "interpolated", "modelled"}


def test_same_question_same_answer(tmp_path, capsys):
    answers = []
    for name in ("a", "b"):
        path = tmp_path / name
        main(["estimate", *LLAMA, "--prompt-tokens", "500~0.7", "--rate", "4", "--seed", "3", "--json", str(path)])
        answers.append(path.read_text())
    assert answers[0] == answers[1]


def test_compare_lists_the_cheapest_first_and_writes_csv_and_a_picture(tmp_path, capsys):
    table, picture = tmp_path / "plans.csv", tmp_path / "plans.png"
    arguments = ["--gpu", "H100", "L40S", "--tp", "1", "--cache", "bf16", "fp8", "--concurrency", "16"]
    assert main(["compare", *LLAMA, *arguments, "--csv", str(table), "--plot", str(picture)]) == 0
    assert "1 x L40S, fp8" in said(capsys)
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    prices = [float(row["dollars_per_million"]) for row in rows if row["slos_met"] == "True"]
    assert prices == sorted(prices)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_many_plans_on_several_processes_are_what_they_are_on_one(tmp_path, capsys):
    given = ["--gpu", "H100", "L40S", "--tp", "1", "2", "4", "--concurrency", "4"]
    every, some = tmp_path / "every.csv", tmp_path / "some.csv"
    assert main(["compare", *LLAMA, *given, "--cache", "bf16", "fp8", "int4", "3bit", "--csv", str(every)]) == 0
    assert main(["compare", *LLAMA, *given, "--cache", "3bit", "--csv", str(some)]) == 0
    lines = every.read_text().splitlines()
    assert len(lines) == 1 + 24
    assert set(some.read_text().splitlines()) <= set(lines)


def test_a_plan_without_room_is_listed_with_the_reason(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["estimate", "--model", "Llama-3.1-70B", "--json", str(path)]) == 2
    printed = capsys.readouterr()
    assert "It does not fit: weights of 131.4 GiB" in printed.out
    assert "fits nowhere" in printed.err
    assert printed.err.endswith("the nearest choice that fits is --tp 2.\n")
    assert json.loads(path.read_text())["users"] == 0


def test_a_table_without_a_plan_that_fits_is_refused(capsys):
    assert main(["compare", "--model", "Llama-3.1-70B", "--gpu", "L40S", "--tp", "1"]) == 2
    assert "the nearest choice that fits is --tp 4" in capsys.readouterr().err


def test_a_chunk_beyond_the_memory_is_refused(capsys):
    assert main(["estimate", *LLAMA, "--chunk", "1000000000"]) == 2
    assert "the nearest choice that fits is --chunk 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", *LLAMA, "--json", "none/plan.json"], "--json is in 'none', which is no folder"),
        (["estimate", *LLAMA, "--csv", "."], "--csv is '.', which is a folder"),
        (["estimate", *LLAMA, "--csv", "-"], "only --json can be the terminal"),
        (["compare", *LLAMA, "--plot", "none/plan.png"], "--plot is in 'none', which is no folder"),
        (["study", "--output", "file/study"], "--output is 'file/study', and no folder can be made there"),
        (["accuracy", "--output", "file"], "--output is 'file', and no folder can be made there"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_any_work(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert "the nearest is" in error


def test_two_answers_in_one_file_are_refused(tmp_path, capsys):
    path = str(tmp_path / "plan")
    assert main(["estimate", *LLAMA, "--json", path, "--csv", path]) == 2
    assert "--json and --csv are both" in capsys.readouterr().err


def test_a_choice_that_is_given_twice_is_looked_at_once(capsys):
    given = ["--gpu", "H100", "h100", "--tp", "1", "1", "--cache", "bf16", "bfloat16", "--concurrency", "1"]
    assert main(["compare", *LLAMA, *given]) == 0
    assert len(said(capsys).splitlines()) == 3


def test_parts_beside_the_decoder_are_named(tmp_path, capsys):
    from elastic_tools.planner.checkpoint import PRESETS

    text = json.loads((PRESETS / "Llama-3.1-8B.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "vision_config": {"depth": 32}}))
    assert main(["estimate", "--model", str(tmp_path), "--concurrency", "1"]) == 0
    assert "The memory of vision_config of" in capsys.readouterr().err


def test_price_changes_dollars_and_nothing_else(tmp_path, capsys):
    found = []
    for price in ("2", "H100=4"):
        path = tmp_path / price
        main(["estimate", *LLAMA, "--concurrency", "8", "--price", price, "--json", str(path)])
        found.append(json.loads(path.read_text()))
    assert found[1]["dollars_per_million"] == pytest.approx(2 * found[0]["dollars_per_million"], rel=1e-3)
    assert found[1]["output_tokens_per_s"] == found[0]["output_tokens_per_s"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpu", "H1000"], "nearest is H100"),
        (["--cache", "fp9"], "nearest is fp8"),
        (["--tp", "3"], "nearest is 2"),
        (["--tp", "0"], "must be 1 or more"),
        (["--rate", "-1"], "rate is -1"),
        (["--ttft", "-1"], "TTFT is -1"),
        (["--workload", "chatt"], "nearest is chat"),
        (["--price", "cheap"], "'cheap'"),
        (["--price", "H1=2"], "nearest is H100"),
        (["--price", "-2"], "price per GPU hour is -2"),
        (["--prompt-tokens", "-5"], "'-5'"),
        (["--prompt-tokens", "200000"], "the most is 131,072"),
        (["--chunk", "0"], "chunk is 0"),
        (["--chunk", "256", "--sequences", "512"], "--chunk 512"),
        (["--sequences", "-4"], "sequences is -4"),
        (["--utilization", "1.2"], "utilization of 1.2"),
        (["--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--weights", "int3"], "nearest is int"),
        (["--weights", ""], "Weights of ''"),
        (["--seed", "-1"], "seed is -1"),
        (["--concurrency", "100000"], "nearest is 4096"),
        (["--cache", "nvfp4"], "nearest is int4_per_token_head"),
        (["--cache", "ultraquant_4bit"], "AMD"),
        (["--price", "=2"], "names a GPU ''"),
        (["--price", "A100=nan"], "price per GPU hour is nan"),
        (["--price", "1e308"], "nearest that is planned for is 1e+09"),
        (["--rate", "1e-320"], "nearest that is planned for is 1e-06"),
        (["--prompt-tokens", "1" + "0" * 400], "nearest that is planned for is 16777216"),
        (["--prompt-tokens", "1" + "0" * 5000], "must be tokens such as 1024"),
        (["--prompt-tokens", "1024~"], "must be tokens such as 1024"),
        (["--model", "m" * 5000], "File name too long"),
        (["--model", "~nobody-by-this-name/config.json"], "a preset such as"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments, sentence, capsys):
    assert main(["estimate", *LLAMA, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 700


@pytest.mark.parametrize(
    "arguments",
    [[], ["guess"], ["estimate"], ["estimate", *LLAMA, "--rate", "x"], ["estimate", *LLAMA, "--rate", "-inf"]],
)
def test_options_that_are_none_get_a_sentence_too(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("plan: ")
    assert error.endswith("--help` lists what there is.\n")


def test_sizes_that_the_model_cannot_have_are_named(capsys):
    assert main(["compare", *LLAMA, "--gpu", "H100", "--tp", "1", "3", "--cache", "bf16", "--concurrency", "4"]) == 0
    assert capsys.readouterr().err == "plan: TP 3 is left out: 32 attention heads cannot be divided by it.\n"


def test_a_model_that_fits_nowhere(capsys):
    assert main(["recommend", "--model", "Llama-3.1-70B", "--gpu", "L40S", "--tp", "1"]) == 2
    error = capsys.readouterr().err
    assert "fits nowhere: on 1 x L40S its weights take 131.4 of 40.8 GiB" in error
    assert error.endswith("the nearest choice that fits is --tp 4.\n")


def test_a_config_json_is_read_like_a_preset(tmp_path, capsys):
    from elastic_tools.planner.checkpoint import PRESETS

    (tmp_path / "config.json").write_text((PRESETS / "Llama-3.1-8B.json").read_text())
    assert main(["estimate", "--model", str(tmp_path), "--concurrency", "4", "--json", "-"]) == 0
    own = json.loads(said(capsys))
    assert main(["estimate", *LLAMA, "--concurrency", "4", "--json", "-"]) == 0
    assert {**own, "model": ""} == {**json.loads(said(capsys)), "model": ""}


def test_what_cannot_be_written_is_said(capsys):
    missing = Path("/proc/nowhere/plan.csv")
    assert main(["estimate", *LLAMA, "--concurrency", "4", "--csv", str(missing)]) == 2
    assert "--csv is in '/proc/nowhere', which is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["study", "--workers", "0"], "workers is 0"),
        (["recommend", *LLAMA, "--cache", "nvfp4"], "nearest is int4_per_token_head"),
        (["regime", "--cache", "nvfp4"], "needs compute capability 10.0"),
        (["regime", "--gpu", "H1"], "nearest is H100"),
        (["regime", "--ttft-cost", "2"], "ttft-cost is 2"),
        (["regime", "--plot", "map.foo"], "nearest is map.png"),
        (["compare", *LLAMA, "--plot", "map"], "nearest is map.png"),
        (["compare", "--model", "DeepSeek-V2-Lite", "--cache", "int4"], "nearest is fp8"),
        (["recommend", "--model", "nothing"], "no model"),
        (["recommend", *LLAMA, "--chunk", "2048", "8192"], "nearest is --chunk 8192"),
    ],
)
def test_bad_input_of_other_verbs(arguments, sentence, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_recommend_leaves_formats_out_that_a_gpu_lacks(capsys):
    assert main(["recommend", *LLAMA, "--gpu", "H100", "--tp", "1", "--cache", "nvfp4", "fp8"]) == 0
    assert "nvfp4" not in said(capsys)


def test_emit_is_yaml_for_vllm(capsys):
    assert main(["emit", *LLAMA, "--gpu", "H100", "--tp", "1"]) == 0
    options = yaml.safe_load(said(capsys))
    assert options["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert options["tensor-parallel-size"] == 1
    assert options["max-model-len"] == 131_072


def test_emit_says_what_vllm_can_load(tmp_path, capsys):
    from elastic_tools.planner.checkpoint import PRESETS

    text = (PRESETS / "Llama-3.1-8B.json").read_text()
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "other.json").write_text(text)
    given = ["--gpu", "H100", "--tp", "1"]
    for source in (tmp_path, tmp_path / "config.json"):
        assert main(["emit", "--model", str(source), *given]) == 0
        assert yaml.safe_load(said(capsys))["model"] == str(tmp_path)
    assert main(["emit", "--model", str(tmp_path / "other.json"), *given]) == 2
    assert "--serve" in capsys.readouterr().err
    assert main(["emit", "--model", str(tmp_path / "other.json"), *given, "--serve", "org/model"]) == 0
    assert yaml.safe_load(said(capsys))["model"] == "org/model"
