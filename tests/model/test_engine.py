"""The model in the real engine. One engine, in a process of its own, answers all questions."""

import json
import subprocess
import sys

import pytest
from support.servers import engine_environment

pytestmark = pytest.mark.engine

QUESTIONS = """
import json, sys
from vllm import LLM, SamplingParams

small = {"max_model_len": 512, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, **small)
greedy = SamplingParams(temperature=0, max_tokens=8)
plain = llm.generate(["The capital of France is"], greedy, use_tqdm=False)[0].outputs[0]
question = [{"role": "user", "content": "Answer with one word: what is the capital of Italy?"}]
chat = llm.chat(question, greedy, use_tqdm=False)
answers = {"plain": plain.text, "chat": chat[0].outputs[0].text, "prompt": chat[0].prompt}
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(smollm2):
    environment = engine_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", QUESTIONS, str(smollm2)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.rpartition("ANSWERS")[2])


def test_greedy_text(answers):
    assert answers["plain"].startswith(" Paris.")


def test_chat(answers):
    assert answers["prompt"].endswith("<|im_start|>assistant\n")
    assert "Rome" in answers["chat"]
