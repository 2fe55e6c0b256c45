"""The page of ``scripts/plan study``, and what it prints."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from elastic_tools.planner.cache import cache_dtype, kv_layout
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.claims import COMMON, GAP_HEAD, claim_rows, gap_rows, walls
from elastic_tools.planner.operators import DEQUANTISATION
from elastic_tools.planner.record import table
from elastic_tools.planner.regime import Regime, summary

if TYPE_CHECKING:
    from elastic_tools.planner.study import Cell, Pair


def ratio(cache: str) -> float:
    """How many times fewer bytes a token of Llama-3.1-8B takes than with 16 bit."""
    model = load_model("Llama-3.1-8B")
    plain, packed = (kv_layout(model, cache_dtype(name)).bytes_per_token for name in ("bf16", cache))
    return plain / packed


def why() -> Iterator[str]:
    """What the verdicts rest on, paragraph by paragraph."""
    paragraphs = (
        f"""\
A compressed cache that costs what its bytes cost always wins where the weights fit one GPU. Published kernels do
not all read that fast. fp8 does: it is measured on three of the four GPUs, and a decode step is faster with it than
with 16 bit. The formats with a scale for each token and head are modelled at {DEQUANTISATION["int8_per_token_head"]}
(int8) and {DEQUANTISATION["int4_per_token_head"]} (int4) times the attention of 16 bit, and 3-bit TurboQuant at
{DEQUANTISATION["turboquant_3bit_nc"]:g} times. These are the weakest figures here: for int8 the two sources give 0.60
and 1.28, and both assume how much of a step is attention (`scripts/elastic_tools/planner/operators.py` names
them). With such factors fewer bytes buy room more than speed, so where decode attention fills most of a step (long
contexts, many requests), more GPUs with a 16-bit cache can be cheaper than a small cache that is slow to read. "Free
to read" below are the same formats at the cost of their bytes: with them the paper's result comes out.""",
        """\
The same factors are why the gap does not grow: fp8 and int8 hold up to twice as many requests, so at a relief of 3 and
4 only the slow formats are left.""",
        f"""\
Users per dollar: 3 bit takes {ratio("3bit"):.1f} times fewer bytes than 16 bit (Llama-3.1-8B, with its layers at both
ends in 16 bit), and more GPUs hold more for a dollar, not less, since they keep the weights once. So on one kind of GPU
there is no factor of 16. It comes where a GPU whose weights leave room is compared with one whose weights leave next to
none.""",
    )
    for text in paragraphs:  # wrapped after the figures are in, so that a page is the same whatever their length
        yield from (fill(text, 120, break_long_words=False, break_on_hyphens=False), "")


def terminal(cells: Sequence["Cell"], found: Sequence["Pair"]) -> str:
    """The claims beside the data, and the gaps."""
    lines = []
    for claim, data, verdict in claim_rows(cells, found):
        lines += [f"Claim: {claim}.", f"  Data: {data}.", f"  Verdict: {verdict}.", ""]
    return "\n".join([*lines, table(GAP_HEAD, gap_rows([pair for pair in found if pair.fewest == 1]))])


def reserve(map_: Sequence[Regime], strict: Sequence[Regime]) -> str:
    """Paper A's claim about the reserve beside the map, and beside the map in which no TTFT may be lost."""
    lent, lent_strict = ([each for each in found if each.verdict == "lend"] for found in (map_, strict))
    largest = max(each.chunk for each in map_)
    model = map_[0].model
    shares = {e.tp: e.lent_most / e.tokens for e in map_ if (e.model, e.chunk, e.context) == (model, largest, 8192)}
    melting = ", ".join(f"{100 * share:.0f}% at TP {tp}" for tp, share in shares.items())
    costs = [each.cost for each in map_ if each.verdict == "small-chunk"]
    where = "; ".join(f"{e.model}, TP {e.tp}, chunk {e.chunk:,}, {e.context:,} tokens" for e in lent[:4])
    return (
        "Paper A claims that a smaller chunk recovers more than lending, that the reserve melts under tensor "
        f"parallelism, and that lending pays for small models with very long prompts and no tensor parallelism only. "
        f"Lending gains more in {len(lent)} of {len(map_)} points{f' ({where})' if lent else ''}; where no TTFT at all "
        f"may be lost, in {len(lent_strict)} of {len(strict)}. What a chunk of {largest:,} tokens keeps from the cache "
        f"of {model} is {melting}. Where the smaller chunk wins it costs {100 * statistics.median(costs):.1f}% of the "
        f"TTFT at the median, and {100 * max(costs):.1f}% at most. That rests on a model, since no prompt was measured "
        "in pieces: a piece is as slow over itself as a prompt of its length, and over the tokens before it as fast as "
        "the whole prompt, which is the least that cutting can cost. If pieces are slower than that, lending gains."
    )


def document(
    cells: Sequence["Cell"],
    found: Sequence["Pair"],
    checked: Sequence[dict[str, Any]],
    map_: Sequence[Regime],
    strict: Sequence[Regime],
) -> str:
    """The page in docs/results."""
    one = [pair for pair in found if pair.fewest == 1]
    losers = Counter((pair.cache, pair.gpu) for pair in one if pair.gap < 1 and not pair.ideal)
    rows = [[f"{cache} on {name}", str(count)] for (cache, name), count in losers.most_common()]
    checks = [[str(value) for value in row.values()] for row in checked]
    lines = [
        "# More GPUs or a smaller cache",
        "",
        "Made by `make plan-study`. Nothing here was run on a GPU: memory and times are the "
        "planner's, with the errors that "
        "[planner-accuracy.md](planner-accuracy.md) states. Prices are those of "
        "`configs/hardware.toml`. Terms: the relief is "
        "the number of requests at a time, as a multiple of what a 16-bit cache holds on the fewest "
        "GPUs; the gap is the cost with "
        "more GPUs over the cost with a smaller cache, at the same requests; an eighth of the context is generated. No "
        "context goes beyond what the model's config.json says that it takes.",
        "",
        "## The claims beside the data",
        "",
        "| claim | data | verdict |",
        "|---|---|---|",
        *(f"| {claim} | {data} | {verdict} |" for claim, data, verdict in claim_rows(cells, found)),
        "",
        "## Where the data disagrees, and why",
        "",
        *why(),
        table(("more GPUs are cheaper (weights fit one GPU)", "comparisons"), rows, markdown=True) if rows else "",
        "",
        "## The cost gap",
        "",
        "Weights fit one GPU:",
        "",
        table(GAP_HEAD, gap_rows(one), markdown=True),
        "",
        "Weights need several GPUs (the fewest that hold them is the base):",
        "",
        table(GAP_HEAD, gap_rows([pair for pair in found if pair.fewest > 1]), markdown=True),
        "",
        "![Cost gap and speed](planner-study.png)",
        "",
        "## Is context the wall?",
        "",
        table(
            ("model", "GPU", "the model takes", "1 request on one GPU", f"{COMMON} requests"),
            walls(cells),
            markdown=True,
        ),
        "",
        "## Where lending the reserve gains more than a smaller chunk",
        "",
        "H100, 16-bit cache, 512 output tokens, a smaller chunk may cost 1% of the TTFT; counts of points. Data: "
        "[planner-regime.json](planner-regime.json).",
        "",
        reserve(map_, strict),
        "",
        "```",
        summary(map_),
        "```",
        "",
        "![The regime map](planner-regime.png)",
        "",
        "## Arithmetic and simulation",
        "",
        "The sweep takes steady states by arithmetic. The discrete-event simulation beside it, for a few plans:",
        "",
        table(("plan", "requests", "tokens/s", "simulated", "TPOT ms", "simulated"), checks, markdown=True),
        "",
    ]
    return "\n".join(lines)
