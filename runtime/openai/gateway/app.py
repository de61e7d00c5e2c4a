"""The application: routes, error shapes and layers put together from the options.

Invariant: every error of every route leaves in OpenAI's shape. Must not know sockets or processes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from gptoss_trt import __version__
from gptoss_trt.runtime.openai.errors import RequestError
from gptoss_trt.runtime.openai.gateway import generation_routes, response_routes, service_routes
from gptoss_trt.runtime.openai.gateway.front import Front, error_response
from gptoss_trt.runtime.openai.gateway.keys import Keys
from gptoss_trt.runtime.openai.gateway.metrics import Metrics
from gptoss_trt.runtime.openai.gateway.options import LOST_SIGNALS, GatewayOptions
from gptoss_trt.runtime.openai.gateway.readiness import Readiness
from gptoss_trt.runtime.openai.gateway.store import ResponseStore
from gptoss_trt.runtime.openai.gateway.triton import TritonModels


def create_app(options: GatewayOptions) -> ASGIApp:
    """The gateway as an ASGI application. Raises OptionsError for a key file that cannot be used."""
    keys = Keys.read(options.api_key_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.models = TritonModels(options.grpc_url)
        _hear_of_losses(app.state.models, options)
        app.state.readiness = Readiness(app.state.models, options)
        app.state.store = ResponseStore(
            options.store_file, options.store_count, options.store_bytes, options.store_age_s
        )
        yield
        app.state.store.close()
        await app.state.models.close()

    app = FastAPI(
        title="gptoss-trt", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.options = options
    app.state.metrics = Metrics()
    app.state.started = int(time.time())
    for module in (generation_routes, response_routes, service_routes):
        app.include_router(module.router)
    app.add_exception_handler(RequestError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(Exception, _fail)
    layered: ASGIApp = Front(app, keys=keys, metrics=app.state.metrics, max_concurrency=options.max_concurrency)
    if options.cors_origin:
        layered = CORSMiddleware(
            layered, options.cors_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return layered


def _hear_of_losses(models: TritonModels, options: GatewayOptions) -> None:
    """Signals go to the main thread's loop; an application that runs in another hears of none."""
    if threading.current_thread() is not threading.main_thread():
        return
    names = {"chat": options.chat_model, "completions": options.completions_model}
    for route, number in LOST_SIGNALS.items():
        asyncio.get_running_loop().add_signal_handler(number, models.lose, names[route])


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE and request.url.path != "/ready":
        request.app.state.readiness.doubt()
    return error_response(error)


async def _fail(_request: Request, _error: Exception) -> Response:
    """What a client sees of a defect; the front logs it."""
    return error_response(RequestError(500, None, "the gateway failed; its log says why", "internal"))


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {request.url.path}: {reason}"
    response = error_response(RequestError(error.status_code, None, message, reason.replace(" ", "_")))
    response.headers.update(error.headers or {})
    return response
