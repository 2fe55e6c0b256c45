# SPDX-License-Identifier: Apache-2.0
"""`GET /elastic_kv` and `POST /elastic_kv/resize`."""

import asyncio
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.logger import init_logger
from vllm.v1.elastic_kv.resize import ResizeRequest, explain

logger = init_logger(__name__)

_LARGEST_BODY = 64 << 10  # bytes
_LOOK_SECONDS = 1.0  # between looks at whether the engine still lives


def _api_keys(app: FastAPI) -> list[str]:
    """The server's keys, found as upstream's middleware finds them."""
    return [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]


def _check_api_key(request: Request) -> None:
    # Upstream's middleware guards /v1 and the like, not this path.
    keys = _api_keys(request.app)
    if keys and not AuthenticationMiddleware(request.app, keys).verify_token(request.headers):
        raise HTTPException(HTTPStatus.UNAUTHORIZED, "Unauthorized")


async def _answer_of(engine: Any, call: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The engine's answer to `call`.

    Raises:
        EngineDeadError: The engine ended meanwhile, and will not answer.

    """
    task = asyncio.ensure_future(call)
    while not (await asyncio.wait({task}, timeout=_LOOK_SECONDS))[0]:
        if engine.errored:
            task.cancel()
            raise engine.dead_error
    return task.result()


state_router = APIRouter()
admin_router = APIRouter(dependencies=[Depends(_check_api_key)])


@state_router.get("/elastic_kv")
async def state(request: Request) -> JSONResponse:
    """The size of the KV cache, and how its last resizes went."""
    engine = request.app.state.engine_client
    return JSONResponse(await _answer_of(engine, engine.elastic_kv_state()))


@admin_router.post("/elastic_kv/resize", openapi_extra={"requestBody": {"required": True}})
async def resize(request: Request) -> JSONResponse:
    """Resize the KV cache; answers when it has ended."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST_BODY:
                message = f"The body is too long; at most {_LARGEST_BODY} bytes are taken."
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
    except ClientDisconnect as error:  # nobody reads this answer; without it the log has a traceback
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The client left before the request was read.") from error
    try:
        wanted = ResizeRequest.model_validate_json(body)
        engine = request.app.state.engine_client
        answer = await _answer_of(engine, engine.resize_kv_cache(**wanted.model_dump()))
    except ValidationError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, explain(error)) from error
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
    had = answer["outcome"] in ("done", "partial")
    return JSONResponse(answer, HTTPStatus.OK if had else HTTPStatus.CONFLICT)


def attach_router(app: FastAPI) -> None:
    """Serve the interface, as far as `--elastic-kv-config` and the API key allow."""
    config = getattr(app.state.args, "elastic_kv_config", None)
    if config is None:
        return
    app.include_router(state_router)
    allowed = config.admin_api if config.admin_api is not None else bool(_api_keys(app))
    if allowed:
        app.include_router(admin_router)
    else:
        logger.info(
            "POST /elastic_kv/resize is off: set an API key, or admin_api in --elastic-kv-config, to switch it on."
        )
