"""The HTTP interface over a stand-in for the engine: who may resize, and what bad input answers."""

import argparse
import asyncio
import json

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.v1.elastic_kv import api_router
from vllm.v1.elastic_kv.api_router import attach_router
from vllm.v1.elastic_kv.resize import ResizeRequest
from vllm.v1.engine.exceptions import EngineDeadError

KEY = "open sesame"
DONE = {"outcome": "done", "from": 10, "to": 20, "evicted": 0, "moved": 0, "preempted": 0, "reason": None}


class Engine:
    """Answers as the engine core does, and remembers what was asked."""

    errored = False
    dead_error = EngineDeadError()

    def __init__(self):
        self.asked = []
        self.answer = DONE

    async def elastic_kv_state(self):
        return {"policy": "static"}

    async def resize_kv_cache(self, **fields):
        ResizeRequest.model_validate(fields).target_blocks(1000, 10, 4096, 16)  # raises as the engine core would
        self.asked.append(fields)
        return self.answer


@pytest.fixture
def engine():
    return Engine()


def client(engine, config, api_key=None):
    app = FastAPI()
    app.add_exception_handler(HTTPException, http_exception_handler)
    app.state.args = argparse.Namespace(elastic_kv_config=config, api_key=api_key, log_error_stack=False)
    app.state.engine_client = engine
    attach_router(app)
    return TestClient(app)


def post(http, body, key=KEY):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post("/elastic_kv/resize", content=content, headers=headers)


def test_nothing_is_served_where_the_cache_is_not_elastic(engine):
    http = client(engine, None)
    assert http.get("/elastic_kv").status_code == 404
    assert post(http, {"blocks": 20}).status_code == 404


@pytest.mark.parametrize(
    ("admin_api", "server_key", "sent_key", "status"),
    [
        (None, None, None, 404),
        (None, KEY, KEY, 200),
        (None, KEY, None, 401),
        (None, KEY, KEY + "x", 401),
        (None, KEY, "", 401),
        (True, None, None, 200),
        (True, KEY, KEY, 200),
        (True, KEY, None, 401),
        (False, None, None, 404),
        (False, KEY, KEY, 404),
    ],
)
def test_who_may_resize(engine, admin_api, server_key, sent_key, status):
    http = client(engine, ElasticKVConfig(admin_api=admin_api), [server_key] if server_key else None)
    assert post(http, {"blocks": 20}, sent_key).status_code == status
    assert len(engine.asked) == (status == 200)
    assert http.get("/elastic_kv").json() == {"policy": "static"}  # reading is open, as /metrics is


def test_the_key_may_come_from_the_environment(engine, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    http = client(engine, ElasticKVConfig())
    assert post(http, {"blocks": 20}, None).status_code == 401
    assert post(http, {"blocks": 20}).status_code == 200


def test_a_refused_resize_is_a_conflict_with_the_same_body(engine):
    engine.answer = DONE | {"outcome": "refused", "to": 10, "reason": "rank 1: out of memory"}
    answer = post(client(engine, ElasticKVConfig(admin_api=True)), {"fraction": 0.5})
    assert answer.status_code == 409
    assert answer.json() == engine.answer


def test_what_is_asked_reaches_the_engine(engine):
    http = client(engine, ElasticKVConfig(admin_api=True))
    body = {"bytes": "1MiB", "dry_run": True, "allow_preemption": False, "timeout_s": 5}
    assert post(http, body).status_code == 200
    asked = engine.asked[0]
    assert asked["bytes"] == 1 << 20
    assert (asked["dry_run"], asked["allow_preemption"], asked["timeout_s"]) == (True, False, 5)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "exactly one of blocks, bytes, tokens, fraction"),
        ({"blocks": 20, "bytes": 4096}, "got blocks, bytes"),
        ({"blocks": -1}, "blocks"),
        ({"blocks": 0}, "blocks"),
        ({"blocks": 9}, "10 (its base)"),
        ({"blocks": 1001}, "1000 (its capacity)"),
        ({"blocks": 1e30}, "blocks"),
        ({"blocks": "many"}, "blocks"),
        ({"blocks": "20"}, "blocks"),
        ({"blocks": True}, "blocks"),
        ({"blocks": 1.5}, "blocks"),
        ({"blocks": [20]}, "blocks"),
        ({"blocks": None}, "got none"),
        ({"bytes": "1 parsec"}, "'1 parsec'"),
        ({"bytes": -5}, "bytes"),
        ({"bytes": 1}, "10 (its base)"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 10**9}, "1000 (its capacity)"),
        ({"fraction": -0.1}, "fraction"),
        ({"fraction": 7}, "fraction"),
        ({"fraction": 0.001}, "10 (its base)"),
        ({"blocks": 20, "timeout_s": -1}, "timeout_s"),
        ({"blocks": 20, "dry_run": "perhaps"}, "dry_run"),
        ({"nonsense": 3}, "nonsense"),
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[1]", "object"),
        (b'{"blocks": NaN}', "blocks"),
        (b'{"fraction": NaN}', "fraction"),
        (b'{"fraction": Infinity}', "fraction"),
        (b'{"blocks": 1' + b"0" * 5000 + b"}", "out of range"),
        (b'{"bytes": 1' + b"0" * 5000 + b"}", "out of range"),
        (b"\xff\xfe", "JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_input_is_refused_by_name_and_changes_nothing(engine, body, names):
    answer = post(client(engine, ElasticKVConfig(admin_api=True)), body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert names in message
    assert len(message) < 500
    assert engine.asked == []


def test_a_dead_engine_is_reported(engine, monkeypatch):
    """A call that the engine will never answer ends, instead of waiting for ever."""
    monkeypatch.setattr(api_router, "_LOOK_SECONDS", 0.01)

    async def never(**_):
        engine.errored = True
        await asyncio.Event().wait()

    engine.resize_kv_cache = never
    http = client(engine, ElasticKVConfig(admin_api=True))
    with pytest.raises(EngineDeadError):
        post(http, {"blocks": 20})


def test_a_huge_body_is_refused(engine):
    body = b'{"blocks": 20, "nonsense": "' + b"x" * (70 << 10) + b'"}'
    assert post(client(engine, ElasticKVConfig(admin_api=True)), body).status_code == 413
    assert engine.asked == []


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_it_is_read_changes_nothing(engine):
    app = client(engine, ElasticKVConfig(admin_api=True)).app
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/elastic_kv/resize",
        "raw_path": b"/elastic_kv/resize",
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert engine.asked == []
