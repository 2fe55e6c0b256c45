"""One engine that is resized between requests: the same tokens at every size, and the memory that it says.

    python smoke.py '{"model": "...", "elastic": {...}, "eager": false}'

The last line of the output that begins with a brace is JSON; the engine may log behind it as it ends.
"""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Question: name three things that are blue.\nAnswer:",
    "One evening he wrote " * 20,
]


def main(options: dict[str, Any]) -> dict[str, Any]:
    """What came of it: the page driver, and for each size what was asked, what is there and the tokens."""
    llm = LLM(
        model=options["model"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=1,  # one at a time, so that no sum is made in another order
        enable_prefix_caching=False,  # each round computes the same
        enforce_eager=options["eager"],
        elastic_kv_config=options["elastic"],
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    rounds = []
    for fraction in (None, 0.1, 1.0, 0.3):
        answer = llm.resize_kv_cache(fraction=fraction) if fraction else None
        state = llm.elastic_kv_state()
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        rounds.append(
            {
                "outcome": answer and answer["outcome"],
                "blocks": state["blocks"]["resident"],
                "resident": state["bytes"]["resident"],
                "reported": state["bytes"]["reported"],
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            }
        )
    return {"driver": llm.elastic_kv_state()["driver"], "rounds": rounds}


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
