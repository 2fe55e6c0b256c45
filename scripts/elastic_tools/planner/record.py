"""Estimates as plain data, for JSON and CSV, and as text with the arithmetic shown."""

import csv
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from elastic_tools.planner.estimate import Estimate, times_of
from elastic_tools.planner.memory import FRAMEWORK, GIB, GRAPH_PER_LAYER
from elastic_tools.planner.model import ELEMENT
from elastic_tools.planner.workload import Workload


def row(estimate: Estimate) -> dict[str, Any]:
    """The figures of an estimate on one line; None where the plan does not fit."""
    plan, memory, outcome = estimate.plan, estimate.memory, estimate.outcome
    figures: dict[str, Any] = {
        "model": plan.model.name,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "cache": plan.dtype.name,
        "chunk": plan.step_tokens,
        "blocks": memory.blocks,
        "kv_bytes_per_token": memory.layout.bytes_per_token,
        "users": round(estimate.users, 2),
        "users_per_dollar_hour": round(estimate.users / plan.price, 3),
        "concurrency": estimate.concurrency,
        "output_tokens_per_s": None,
        "ttft_p90_ms": None,
        "tpot_p90_ms": None,
        "preemptions": None,
        "dollars_per_million": None,
        "dollars_per_hour": round(plan.price, 3),
        "slos_met": estimate.met,
        "problem": estimate.problem,
    }
    if outcome is not None:
        figures |= {
            "output_tokens_per_s": round(outcome.tokens, 1),
            "ttft_p90_ms": round(outcome.ttft["p90"], 1),
            "tpot_p90_ms": round(outcome.tpot["p90"], 2),
            "preemptions": outcome.preemptions,
            "dollars_per_million": round(estimate.dollars, 4) if math.isfinite(estimate.dollars) else None,
        }
    return figures


def full(estimate: Estimate) -> dict[str, Any]:
    """Everything about an estimate. Bytes, ms, and how each kind of work is known."""
    memory = estimate.memory
    return row(estimate) | {
        "memory_bytes": {
            "total": memory.total,
            "requested": memory.requested,
            "weights": memory.weights,
            "reserve": memory.reserve.total,
            "graphs": memory.graphs,
            "framework": memory.framework,
            "cache": memory.cache,
            "per_block": memory.layout.bytes_per_block,
        },
        "block_tokens": memory.layout.block,
        "sources": {name: source.name.lower() for name, source in estimate.sources.items()},
    }


def as_json(data: Any) -> str:
    """Data as JSON. The same data give the same text."""
    return json.dumps(data, indent=1)


def to_json(path: Path, data: Any) -> None:
    """Writes data as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(data) + "\n")


def columns(path: Path, tables: dict[str, dict[str, list[Any]]]) -> None:
    """Writes tables as JSON, a column on each line, which keeps large ones small and their changes readable."""
    parts = []
    for name, table_ in tables.items():
        lines = [
            f"  {json.dumps(column)}: {json.dumps(values, separators=(',', ':'))}" for column, values in table_.items()
        ]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def to_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows with a header line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """Columns as wide as they have to be: the first to the left, the others to the right."""
    lines = [list(head), *(list(each) for each in rows)]
    wide = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def one(line: Sequence[str]) -> str:
        cells = [cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, wide, strict=True))]
        return f"| {' | '.join(cells)} |" if markdown else "  ".join(cells).rstrip()

    rule = f"|{'|'.join('-' * (w + 1) + ('-' if n == 0 else ':') for n, w in enumerate(wide))}|"
    return "\n".join([one(lines[0]), rule if markdown else "  ".join("-" * w for w in wide), *map(one, lines[1:])])


HEAD = ("plan", "users", "at a time", "tokens/s", "TTFT p90", "TPOT p90", "$/1M", "$/h", "users/$h", "SLOs")


def line(estimate: Estimate) -> list[str]:
    """A line under ``HEAD``."""
    plan, outcome = estimate.plan, estimate.outcome
    name = f"{plan.tp} x {plan.gpu.name}, {plan.dtype.name}, chunk {plan.step_tokens:,}"
    if outcome is None:
        return [name, f"{estimate.users:.1f}", *["-"] * 5, f"{plan.price:.2f}", "-", "no room"]
    return [
        name,
        f"{estimate.users:.1f}",
        str(estimate.concurrency or f"{outcome.running:.1f}"),
        f"{outcome.tokens:,.0f}",
        f"{outcome.ttft['p90']:,.0f} ms",
        f"{outcome.tpot['p90']:.1f} ms",
        f"{estimate.dollars:.3f}",
        f"{plan.price:.2f}",
        f"{estimate.users / plan.price:.1f}",
        "met" if estimate.met else "missed",
    ]


def explain(estimate: Estimate, workload: Workload) -> str:
    """One estimate for a terminal: each figure with the arithmetic behind it and how it is known."""
    plan, memory = estimate.plan, estimate.memory
    model, reserve, layout = plan.model, memory.reserve, memory.layout
    tokens, sequences = plan.step_tokens, plan.step_sequences
    length = workload.length
    per_request = memory.request_blocks(length)
    graphs = memory.graphs - model.layers * GRAPH_PER_LAYER

    def gib(size: float) -> str:
        return f"{size / GIB:8.2f} GiB"

    inner, widest = ("sampler", reserve.logits) if reserve.logits > reserve.wide else ("widest layer", reserve.wide)
    lines = [
        f"{model.name} on {plan.tp} x {plan.gpu.name}, cache {plan.dtype.name}, "
        f"steps of up to {tokens:,} tokens and {sequences:,} requests",
        "",
        "Memory of one GPU",
        f"  {gib(memory.requested)}  may be used: {memory.total / GIB:.2f} x {memory.utilization:g}",
        f"- {gib(memory.weights)}  weights: {model.parameters / 1e9:.2f} B parameters, linear layers "
        f"{model.weights.stored:g} bits"
        + (f", over {plan.tp} GPUs" if plan.tp > 1 else "")
        + "  [exact up to padding]",
        f"- {gib(reserve.total)}  activation reserve: residual stream {reserve.hidden / GIB:.2f} = 2 "
        f"x {tokens:,} x {model.hidden:,} x "
        f"{ELEMENT} B, and {inner} {widest / GIB:.2f}  [modelled]",
        f"- {gib(memory.graphs)}  CUDA graphs: {graphs / GIB:.2f} + {model.layers} layers x "
        f"{GRAPH_PER_LAYER / 2**20:.0f} MiB  [modelled]",
        f"- {gib(memory.framework)}  framework {FRAMEWORK / GIB:.2f}"
        + (f" and NCCL {(memory.framework - FRAMEWORK) / GIB:.2f}" if plan.tp > 1 else "")
        + "  [modelled]",
        f"= {gib(memory.cache)}  KV cache",
    ]
    if estimate.problem:
        return "\n".join([*lines, "", f"It does not fit: {estimate.problem}."])
    lines += [
        "",
        f"  {memory.blocks:,} blocks = {memory.cache:,} B / {layout.bytes_per_block:,} B a block of "
        f"{layout.block} tokens; "
        f"{layout.bytes_per_token:,} B a token on each GPU  [exact]",
        f"  {estimate.users:,.1f} requests of {length:,} tokens = {memory.blocks - 1:,} / "
        f"{per_request:,} blocks  [exact]",
    ]
    outcome = estimate.outcome
    assert outcome is not None
    times = times_of(plan)
    running = max(1, round(outcome.running))
    context = workload.prompt.mean + workload.output.mean / 2
    parts = [(part.name, times.part(part, running), part.source) for part in times.parts if times.part(part, running)]
    parts.append((times.head.name, times.logits(running), times.head.source))
    parts.append(("decode attention", times.decode(running, context), times.attention_source))
    total = times.step(running, context, [])
    lines += ["", f"A step in which {running:,} requests decode, at {context:,.0f} tokens each: {total:.2f} ms"]
    lines += [f"  {ms:8.3f} ms  {name}  [{source.name.lower()}]" for name, ms, source in parts]
    lines += [
        f"  {total - sum(ms for _, ms, _ in parts):8.3f} ms  scheduler and sampler beside the GPU's work  [modelled]"
    ]
    slos = [f"{name} {value:g} ms" for name, value in (("TTFT", workload.ttft), ("TPOT", workload.tpot)) if value]
    how = (
        f"{workload.rate:g} requests arrive a second"
        if workload.rate
        else f"{estimate.concurrency:,} requests at a time"
    )
    if not (workload.rate or workload.concurrency):
        how += f", the most that keep {' and '.join(slos) or 'no SLO'} at the 90th percentile and fit"
    lines += [
        "",
        f"Simulated: {how}",
        f"  {outcome.tokens:,.0f} output tokens/s, {outcome.requests:.2f} requests/s, "
        f"{outcome.preemptions} preemptions, "
        f"cache at most {100 * min(1, outcome.used):.0f}% full",
        f"  TTFT {outcome.ttft['p50']:,.0f} ms at the median, {outcome.ttft['p90']:,.0f} at p90; "
        f"TPOT {outcome.tpot['p50']:.1f} ms, {outcome.tpot['p90']:.1f} at p90",
        f"  ${estimate.dollars:.3f} for a million output tokens = ${plan.price:.3f} an hour / "
        f"({outcome.tokens:,.0f} x 3,600) x 1,000,000",
    ]
    if estimate.most_rate is not None and workload.rate is not None:
        fate = "so it keeps up" if workload.rate <= estimate.most_rate else "so the queue grows without end"
        lines.append(f"  {estimate.most_rate:.2f} requests/s is the most that it answers, {fate}  [arithmetic]")
    if slos:
        lines.append(f"  SLOs ({', '.join(slos)} at p90): {'met' if estimate.met else 'MISSED'}")
    return "\n".join(lines)
