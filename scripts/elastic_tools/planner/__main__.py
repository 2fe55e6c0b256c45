"""``scripts/plan``: the command line of the planner."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from elastic_tools.planner import options, record
from elastic_tools.planner.errors import PlanError, sentence
from elastic_tools.planner.estimate import Estimate, Plan, estimate
from elastic_tools.planner.options import Question
from elastic_tools.planner.remedy import largest, nowhere

EXAMPLES = """examples:
  scripts/plan estimate --model Llama-3.1-8B --gpu H100 --cache fp8
  scripts/plan estimate --model path/to/config.json --gpu L40S --tp 2 --prompt-tokens 8192~0.5 --rate 2
  scripts/plan compare --model Qwen2.5-14B --gpu A100 H100 --tp 1 2 --cache bf16 fp8 --csv plans.csv --plot plans.png
  scripts/plan recommend --model Llama-3.1-70B --workload document --price H100=2.5
  scripts/plan emit --model Llama-3.1-8B --gpu H100 > serve.yaml
  scripts/plan regime --gpu H100 --plot regime.png
"""
WORKERS_FROM = 24  # plans from which a second process pays


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as the rest of the planner does, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Ends with status 2."""
        print(f"plan: {sentence(message)}; `{self.prog} --help` lists what there is.", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The verbs and their options."""
    made = Parser(
        prog="scripts/plan",
        description="Says what a workload costs on which GPUs, and which plan to take. Needs no GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, text: str, several: bool = False, plot: bool = False) -> argparse.ArgumentParser:
        verb = verbs.add_parser(
            name, help=text, description=text, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        options.add_model(verb)
        options.add_hardware(verb, several)
        options.add_workload(verb)
        options.add_output(verb, plot)
        return verb

    add("estimate", "One plan, with the arithmetic of every figure.")
    add("compare", "A table of plans: GPUs x sizes x caches x chunks.", several=True, plot=True)
    add("recommend", "Which plan to take, step by step.", several=True)
    emit = add("emit", "The recommended plan as a file for `vllm serve --config`.", several=True)
    emit.add_argument(
        "--serve",
        metavar="MODEL",
        help="what vLLM is to load (default: the folder that --model names, or the preset's name on Hugging Face)",
    )
    emit.add_argument("--elastic", action="store_true", help="put --elastic-kv-config in: a cache that grows on demand")
    verbs.add_parser("models", help="The presets in configs/models.")
    regime = verbs.add_parser("regime", help="Where lending the reserve gains more than a smaller chunk: the map.")
    regime.add_argument("--gpu", default="H100", help="(default %(default)s)")
    regime.add_argument("--cache", default="bf16", help="cache dtype (default %(default)s)")
    regime.add_argument(
        "--ttft-cost", type=float, default=0.01, help="what a smaller chunk may cost (default %(default)s)"
    )
    options.add_output(regime)
    study = verbs.add_parser("study", help="More GPUs or a smaller cache: the sweep beside the claims of paper B.")
    study.add_argument("--output", type=Path, help="folder for tables and plots (default docs/results)")
    study.add_argument("--workers", type=int, help="processes (default: all cores)")
    accuracy = verbs.add_parser("accuracy", help="The planner against published measurements.")
    accuracy.add_argument("--output", type=Path, help="folder (default docs/results)")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs a verb. 0; 2 for input that makes no plan, with one sentence."""
    given = parser().parse_args(arguments)
    verb = {
        "estimate": estimate_verb,
        "compare": compare_verb,
        "recommend": recommend_verb,
        "emit": emit_verb,
        "models": models_verb,
        "regime": regime_verb,
        "study": study_verb,
        "accuracy": accuracy_verb,
    }[given.verb]
    try:
        options.check(given)
        verb(given)
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    except PlanError as error:
        print(f"plan: {sentence(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the answer has seen enough
        forget_output()
        return 1
    except OSError as error:
        if error.filename is None:
            forget_output()
        what = error.filename or "The answer cannot be written"
        print(f"plan: {sentence(f'{what}: {error.strerror}.')}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plan: stopped.", file=sys.stderr)
        return 130  # what a shell gives for Ctrl-C
    return 0


def forget_output() -> None:
    """Drops what cannot be printed: the interpreter would try again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def show(given: argparse.Namespace, text: str, found: list[Estimate], data: object) -> None:
    """Prints the text, or the JSON alone where that was asked for; writes the files."""
    if given.json == Path("-"):
        print(record.as_json(data))
    else:
        print(text, flush=True)  # what goes wrong with the files comes after it
        if given.json:
            record.to_json(given.json, data)
    if given.csv:
        record.to_csv(given.csv, [record.row(each) for each in found])


def estimate_verb(given: argparse.Namespace) -> None:
    """One plan."""
    asked = options.question(given)
    found = estimate(
        asked.plan(asked.gpus[0], asked.tps[0], asked.caches[0], asked.chunks[0]), asked.workload, asked.seed
    )
    show(given, record.explain(found, asked.workload), [found], record.full(found))
    if found.problem:
        raise PlanError(nowhere(found.plan, asked.workload.length))


def evaluate(asked: Question, plans: list[Plan]) -> list[Estimate]:
    """Estimates, on all cores where there are many; in the order of the plans."""
    if len(plans) < WORKERS_FROM:
        return [estimate(plan, asked.workload, asked.seed) for plan in plans]
    from functools import partial

    from elastic_tools.planner.parallel import spread

    one = partial(estimate, workload=asked.workload, seed=asked.seed)
    return spread(one, plans, "plans", together=4)


def compare_verb(given: argparse.Namespace) -> None:
    """Many plans, the cheapest first."""
    asked = options.question(given)
    plans = asked.plans()
    found = sorted(evaluate(asked, plans), key=lambda each: (each.problem is not None, not each.met, each.dollars))
    show(given, record.table(record.HEAD, map(record.line, found)), found, [record.full(each) for each in found])
    if given.plot:
        from elastic_tools.planner import plots

        plots.pareto([each for each in found if each.outcome], given.plot)
    if all(each.problem for each in found):
        raise PlanError(nowhere(largest(plans), asked.workload.length))


def recommend_verb(given: argparse.Namespace) -> None:
    """The decision."""
    from elastic_tools.planner.recommend import recommend

    asked = options.question(given)
    decision = recommend(asked)
    lines = [f"{number}. {step}" for number, step in enumerate(decision.steps, 1)]
    text = "\n".join([*lines, "", record.table(record.HEAD, [record.line(decision.chosen)])])
    data = {"chosen": record.full(decision.chosen), "steps": decision.steps, "elastic": decision.elastic}
    show(given, text, list(decision.considered), data)


def emit_verb(given: argparse.Namespace) -> None:
    """The recommended plan as YAML."""
    from elastic_tools.planner.emit import as_yaml, served
    from elastic_tools.planner.recommend import recommend

    asked = options.question(given)
    model = served(given.model, given.serve, asked.model)
    decision = recommend(asked)
    text = as_yaml(decision.chosen, model, asked.workload.length, given.weights, given.elastic, lend=decision.elastic)
    show(given, text.rstrip(), [decision.chosen], record.full(decision.chosen))


def models_verb(given: argparse.Namespace) -> None:
    """The presets with their sizes."""
    from elastic_tools.planner.checkpoint import load_model, presets

    models = [load_model(name) for name in presets()]
    rows = [[m.name, f"{m.parameters / 1e9:.2f} B", str(m.heads), str(m.kv_heads), f"{m.max_len:,}"] for m in models]
    print(record.table(("preset", "parameters", "heads", "KV heads", "longest request"), rows))


def regime_verb(given: argparse.Namespace) -> None:
    """The regime map."""
    from elastic_tools.planner import plots
    from elastic_tools.planner.regime import cells, summary

    if not 0 <= given.ttft_cost < 1:
        raise PlanError(f"--ttft-cost is {given.ttft_cost:g}, and must be a share from 0 to below 1, such as 0.01.")
    found = list(cells(gpu_name=given.gpu, cache=given.cache, allowed=given.ttft_cost))
    rows = [each.as_row() for each in found]
    if given.json == Path("-"):
        print(record.as_json(rows))
    else:
        print(summary(found))
        if given.json:
            record.to_json(given.json, rows)
    if given.csv:
        record.to_csv(given.csv, rows)
    if given.plot:
        plots.regime_map(found, given.plot)


def study_verb(given: argparse.Namespace) -> None:
    """Paper B's study."""
    from elastic_tools.planner import study

    study.main(given.output, given.workers)


def accuracy_verb(given: argparse.Namespace) -> None:
    """Published measurements against the planner."""
    from elastic_tools.planner import accuracy

    accuracy.main(given.output)


if __name__ == "__main__":
    sys.exit(main())
