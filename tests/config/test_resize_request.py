"""What `POST /elastic_kv/resize` and `LLM.resize_kv_cache` take."""

import json

import pytest
from pydantic import ValidationError
from vllm.v1.elastic_kv.resize import ResizeRequest, ResizeResult, explain, unwrap

GIB = 1 << 30
LONG = "9" * 5000


def refusal(body) -> str:
    """Why a body is refused, as the caller reads it."""
    read = ResizeRequest.model_validate_json if isinstance(body, str) else ResizeRequest.model_validate
    with pytest.raises(ValidationError) as failure:
        read(body)
    message = explain(failure.value)
    assert 0 < len(message) < 400
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"blocks": 0}, ["blocks:", "greater than 0", "got 0"]),
        ({"blocks": -5}, ["blocks:", "greater than 0", "got -5"]),
        ({"blocks": 1.5}, ["blocks:", "integer", "got 1.5"]),
        ({"blocks": "5"}, ["blocks:", "integer", "got '5'"]),
        ({"blocks": True}, ["blocks:", "integer", "got True"]),
        ({"blocks": [1]}, ["blocks:", "integer", "got [1]"]),
        ({"blocks": {}}, ["blocks:", "integer", "got {}"]),
        ({"blocks": 2**62}, ["blocks:", "less than", f"got {2**62}"]),
        ({"blocks": float("nan")}, ["blocks:", "got nan"]),
        ({"blocks": 10**5000}, ["blocks:", "less than"]),
        ({"tokens": 0}, ["tokens:", "got 0"]),
        ({"tokens": -1}, ["tokens:", "got -1"]),
        ({"tokens": 1e3}, ["tokens:", "got 1000.0"]),
        ({"tokens": None, "blocks": None}, ["exactly one", "got none"]),
        ({"bytes": 0}, ["bytes: 0 is not a size"]),
        ({"bytes": -1}, ["bytes: -1 is not a size"]),
        ({"bytes": 1.5}, ["bytes: 1.5 is not a size"]),
        ({"bytes": True}, ["bytes: True is not a size"]),
        ({"bytes": [1]}, ["bytes: [1] is not a size"]),
        ({"bytes": "1GB"}, ["bytes: '1GB' is not a size"]),
        ({"bytes": "-1GiB"}, ["bytes: '-1GiB' is not a size"]),
        ({"bytes": 10**5000}, ["bytes:", "is not a size"]),
        ({"bytes": LONG}, ["bytes: '999", "is not a size"]),
        ({"fraction": 0}, ["fraction:", "got 0"]),
        ({"fraction": -0.5}, ["fraction:", "got -0.5"]),
        ({"fraction": 1.0001}, ["fraction:", "got 1.0001"]),
        ({"fraction": float("nan")}, ["fraction:", "got nan"]),
        ({"fraction": float("inf")}, ["fraction:", "got inf"]),
        ({"fraction": "0.5"}, ["fraction:", "number", "got '0.5'"]),
        ({"fraction": True}, ["fraction:", "number", "got True"]),
        ({"fraction": 10**5000}, ["fraction:"]),
        ({}, ["exactly one of blocks, bytes, tokens, fraction; got none"]),
        ({"dry_run": True}, ["exactly one", "got none"]),
        ({"blocks": 5, "tokens": 5}, ["exactly one", "got blocks, tokens"]),
        ({"fraction": 0.5, "bytes": "1GiB"}, ["exactly one", "got bytes, fraction"]),
        ({"blocks": 5, "block": 5}, ["block:", "not permitted", "got 5"]),
        ({"blocks": 5, "x" * 5000: 5}, ["xxx", "not permitted", "got 5"]),
        ({"blocks": 5, "dry_run": 1}, ["dry_run:", "boolean", "got 1"]),
        ({"blocks": 5, "dry_run": None}, ["dry_run:", "boolean", "got None"]),
        ({"blocks": 5, "allow_preemption": "yes"}, ["allow_preemption:", "boolean", "got 'yes'"]),
        ({"blocks": 5, "timeout_s": 0}, ["timeout_s:", "got 0"]),
        ({"blocks": 5, "timeout_s": -1}, ["timeout_s:", "got -1"]),
        ({"blocks": 5, "timeout_s": float("nan")}, ["timeout_s:", "got nan"]),
        ({"blocks": 5, "timeout_s": float("inf")}, ["timeout_s:", "got inf"]),
        ({"blocks": 5, "timeout_s": 10**9}, ["timeout_s:", "got 1000000000"]),
        ({"blocks": 5, "timeout_s": "60"}, ["timeout_s:", "got '60'"]),
        ({"blocks": 0, "timeout_s": -1}, ["blocks:", "got 0", "; timeout_s:", "got -1"]),
        ([], ["the request:", "valid dictionary"]),
        (None, ["the request:", "valid dictionary"]),
        (5, ["the request:", "valid dictionary"]),
        ("", ["the request: Invalid JSON"]),
        ("blocks=5", ["the request: Invalid JSON"]),
        ('{"blocks": 5', ["the request: Invalid JSON"]),
        ('"5"', ["the request:", "object"]),
        ('{"blocks": NaN}', ["blocks:", "got nan"]),
        ('{"fraction": Infinity}', ["fraction:", "got inf"]),
        ('{"fraction": 1e999}', ["fraction:", "got inf"]),
        (f'{{"blocks": {LONG}}}', ["the request: Invalid JSON: number out of range"]),
        (f'{{"blocks": {"9" * 4000}}}', ["blocks:", "less than", "got 999"]),
        (f'{{"bytes": {"9" * 4000}}}', ["bytes: 999", "is not a size"]),
        ("[" * 5000, ["the request: Invalid JSON"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused_in_one_sentence(body, words):
    message = refusal(body)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("body", "unit", "value"),
    [
        ({"blocks": 1}, "blocks", 1),
        ({"blocks": 2**62 - 1}, "blocks", 2**62 - 1),
        ({"tokens": 4096}, "tokens", 4096),
        ({"bytes": 1}, "bytes", 1),
        ({"bytes": "1.5GiB"}, "bytes", 3 * GIB // 2),
        ({"bytes": "4096"}, "bytes", 4096),
        ({"fraction": 1}, "fraction", 1),
        ({"fraction": 0.25, "blocks": None}, "fraction", 0.25),
    ],
    ids=str,
)
def test_a_good_request(body, unit, value):
    for request in (ResizeRequest.model_validate(body), ResizeRequest.model_validate_json(json.dumps(body))):
        assert getattr(request, unit) == value
        assert (request.dry_run, request.allow_preemption, request.timeout_s) == (False, True, 60.0)
        # The API server hands it on as plain fields.
        assert ResizeRequest.model_validate(request.model_dump()) == request


def test_options():
    request = ResizeRequest(blocks=5, dry_run=True, allow_preemption=False, timeout_s=1)
    assert (request.dry_run, request.allow_preemption, request.timeout_s) == (True, False, 1.0)


CACHE = {"capacity_blocks": 100, "base_blocks": 10, "block_bytes": 4096, "block_tokens": 16}


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"blocks": 10}, 10),
        ({"blocks": 100}, 100),
        ({"blocks": 55}, 55),
        ({"bytes": 10 * 4096}, 10),
        ({"bytes": 100 * 4096}, 100),
        ({"bytes": 101 * 4096 - 1}, 100),  # a part of a block is no block
        ({"bytes": 11 * 4096 - 1}, 10),
        ({"bytes": "44KiB"}, 11),
        ({"tokens": 145}, 10),  # a part of a block needs a block
        ({"tokens": 160}, 10),
        ({"tokens": 161}, 11),
        ({"tokens": 1600}, 100),
        ({"fraction": 1}, 100),
        ({"fraction": 1.0}, 100),
        ({"fraction": 0.1}, 10),
        ({"fraction": 0.29}, 29),  # 0.29 * 100 is 28.999999999999996
        ({"fraction": 0.57}, 57),
        ({"fraction": 0.999}, 99),
    ],
    ids=str,
)
def test_the_size_in_blocks(fields, blocks):
    assert ResizeRequest(**fields).target_blocks(**CACHE) == blocks


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [
        ({"blocks": 9}, 9),
        ({"blocks": 101}, 101),
        ({"blocks": 2**62 - 1}, 2**62 - 1),
        ({"bytes": 10 * 4096 - 1}, 9),
        ({"bytes": 1}, 0),
        ({"bytes": 101 * 4096}, 101),
        ({"tokens": 144}, 9),
        ({"tokens": 1}, 1),
        ({"tokens": 1601}, 101),
        ({"fraction": 0.0999}, 9),
        ({"fraction": 5e-324}, 0),
    ],
    ids=str,
)
def test_a_size_outside_base_and_capacity_is_refused(fields, blocks):
    ((unit, value),) = fields.items()
    with pytest.raises(ValueError, match="base") as failure:
        ResizeRequest(**fields).target_blocks(**CACHE)
    message = str(failure.value)
    assert f"{unit}={value!r} is {blocks} blocks" in message
    assert "10 (its base)" in message
    assert "100 (its capacity)" in message


def test_every_fraction_of_two_digits_is_exact():
    for percent in range(10, 101):
        assert ResizeRequest(fraction=percent / 100).target_blocks(**CACHE) == percent


def test_the_answer_has_the_names_of_the_interface():
    answer = ResizeResult("partial", before=10, after=8, evicted=3, reason="why").to_dict()
    assert answer == {
        "outcome": "partial",
        "from": 10,
        "to": 8,
        "evicted": 3,
        "moved": 0,
        "moved_bytes": 0,
        "preempted": 0,
        "duration_ms": 0.0,
        "pause_ms": 0.0,
        "reason": "why",
    }
    assert unwrap(answer) is answer
    with pytest.raises(ValueError, match="too large"):
        unwrap({"invalid": "too large"})
