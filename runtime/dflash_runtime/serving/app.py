"""The application: all doors, the server's own routes, and the gate before them."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from dflash_protocol import __version__
from dflash_runtime.serving.access import RequestGate
from dflash_runtime.serving.cors import AllowedOrigins
from dflash_runtime.serving.doors import DOORS
from dflash_runtime.serving.doors.door import error_form_of
from dflash_runtime.serving.errors import ApiError, JSONResponse, api_error, error_response
from dflash_runtime.serving.request_status import requests_status
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import expert_map, props, status
from dflash_runtime.serving.status_page import page_routes


def create_app(state: ServerState) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(
        title="dflash-moe",
        version=__version__,
        # Their pages load scripts from other sites.
        docs_url=None,
        redoc_url=None,
        routes=page_routes(),
    )

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Response:
        is_well = state.worker.is_well
        return JSONResponse({"status": "ok" if is_well else "failed"}, 200 if is_well else 503)

    @app.get("/ready")
    async def ready() -> Response:
        if state.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if state.engine is None:
            return JSONResponse({"status": "loading", "stage": state.worker.stage}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/props")
    async def properties() -> Response:
        return JSONResponse(props(state, state.ready_engine()))

    @app.get("/status")
    async def page_status() -> Response:
        return JSONResponse(status(state, state.ready_engine()))

    @app.get("/status/experts")
    async def page_experts() -> Response:
        engine = state.ready_engine()
        return JSONResponse(expert_map(engine, state.worker.stats.selections))

    @app.get("/status/requests")
    async def page_requests() -> Response:
        state.ready_engine()
        return JSONResponse(requests_status(state.worker))

    for door in DOORS:
        door.add_routes(app, state)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(api_error(error), request.scope)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        refusal = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error_response(refusal, request.scope)

    paths = (getattr(route, "path", "") for route in app.routes)
    endpoints = frozenset(path for path in paths if "{" not in path)
    return RequestGate(
        app,
        keys=state.keys,
        metrics=state.metrics,
        endpoints=endpoints,
        error_form=partial(error_form_of, DOORS),
        origins=AllowedOrigins(state.settings.cors),
    )
