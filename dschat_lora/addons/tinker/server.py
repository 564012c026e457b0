"""``dschat-lora tinker``: the Tinker API over HTTP, until Ctrl-C."""

import asyncio
import hmac
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from dschat_lora.addons.serving.endpoint.answers import BusyError
from dschat_lora.addons.serving.endpoint.guard import HANDLERS, ApiError, invalid, read_json
from dschat_lora.addons.serving.endpoint.http_server import HttpServer
from dschat_lora.addons.serving.endpoint.http_server import make_app as guarded_app
from dschat_lora.addons.serving.endpoint.sockets import address_of, run_until_signal
from dschat_lora.addons.tinker.adapters import CHECKPOINT_FILE, Base, open_base
from dschat_lora.addons.tinker.config import TinkerConfig
from dschat_lora.addons.tinker.formats import JsonFields, parse_message
from dschat_lora.addons.tinker.processes import follow
from dschat_lora.addons.tinker.service import (
    NotFoundError,
    TinkerService,
    TrainingRun,
    end_of_time,
    kept_facts,
)
from dschat_lora.addons.tinker.store import KINDS, Store, Weights, now, size_of
from dschat_lora.addons.tinker.worker import Worker
from dschat_lora.config.staging import alone
from dschat_lora.engine.failure_detection import on_loss
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import log_once

API = "/api/v1"
HEALTH, MESSAGES = f"{API}/healthz", f"{API}/forward_backward"
# Seconds for which a result is waited for, before the client is told to ask again.
POLL_SECONDS = 20.0
MAX_MESSAGE_BYTES = 2**28
MAX_BODY_BYTES = 2**26
OWNER = "local"
CLIENT_VERSION = "0.38"  # of the package tinker, whose protocol this is
LINKS, LINK_SECONDS = "/files", 3600
Answer = Callable[[Request], Awaitable[Response] | Response]


class Links:
    """URLs that are signed: the client fetches files without its key."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of(self, file: str, ends: int) -> str:
        """The path of a URL that is valid until a time in seconds."""
        signed = hmac.new(self._key, f"{ends}/{file}".encode(), "sha256").hexdigest()
        return f"{API}{LINKS}/{ends}/{signed}/{file}"

    def __contains__(self, path: object) -> bool:
        """Whether a path needs no token."""
        assert isinstance(path, str)
        if path == HEALTH:
            return True
        ends, _, rest = path.removeprefix(f"{API}{LINKS}/").partition("/")
        file = rest.partition("/")[2]
        is_valid = re.fullmatch("[0-9]{1,12}", ends) and int(ends) > time.time()
        return bool(is_valid) and hmac.compare_digest(
            path.encode(), self.of(file, int(ends)).encode()
        )


@dataclass(frozen=True)
class Routes:
    """What answers requests over HTTP."""

    service: TinkerService
    links: Links

    async def capabilities(self, request: Request) -> Response:
        """The bases."""
        can = {"trainable": True, "sampleable": True}
        models = [
            {"model_name": name, "max_context_length": base.limit, **can}
            for name, base in self.service.bases.items()
        ]
        return JSONResponse({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        """A new session."""
        fields = JsonFields(await _body(request))
        _check_version(fields)
        kept = {
            "user_metadata": fields.texts("user_metadata"),
            "display_name": fields.take("display_name", str, None),
            "tags": fields.take("tags", list, None),
        }
        return JSONResponse({"session_id": self.service.create_session(kept)})

    async def heartbeat(self, request: Request) -> Response:
        """A session never ends by itself."""
        self.service.session(JsonFields(await _body(request)).take("session_id", str))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """How a session ended."""
        body = await _body(request)
        self.service.finish_session(request.path_params["session"], body.get("reason"))
        return JSONResponse({})

    async def create_model(self, request: Request) -> Response:
        """A new adapter."""
        return await self._new_run(await _body(request))

    async def load(self, request: Request) -> Response:
        """A new adapter from saved weights, or others into one that is there."""
        body = await _body(request)
        if body.get("session_id") is not None:
            return await self._new_run(body)
        return await self._submit("load_weights", body)

    async def _new_run(self, body: dict[str, Any]) -> Response:
        fields = JsonFields(body)
        session, number = fields.take("session_id", str), fields.take("model_seq_id", int)
        taken = ("session_id", "model_seq_id", "type", "weights_access_token")
        rest = {key: value for key, value in body.items() if key not in taken}
        request_id = await asyncio.to_thread(self.service.create_run, session, number, rest)
        return JSONResponse({"request_id": request_id, "model_id": request_id.rpartition(":")[0]})

    async def info(self, request: Request) -> Response:
        """What a model is."""
        run = self.service.run(JsonFields(await _body(request)).take("model_id", str))
        name, tokenizer = {"model_name": run.base.name}, run.base.source.tokenizer
        data = {"arch": type(run.base.model).__name__, **name, "tokenizer_id": tokenizer}
        facts = {"model_id": run.run, "is_lora": True, "lora_rank": run.how.rank, **name}
        return JSONResponse({"type": "get_info", "model_data": data, **facts})

    async def forward_backward(self, request: Request) -> Response:
        """A loss of examples, and its gradient."""
        body = await request.body()
        found = await asyncio.to_thread(parse_message, body)
        return await self._accepted(found.model_id, found.seq_id, "forward_backward", body)

    def of_run(self, kind: str) -> Answer:
        """A request of a run, with a JSON body."""

        async def answer(request: Request) -> Response:
            return await self._submit(kind, await _body(request))

        return answer

    async def _submit(self, kind: str, body: dict[str, Any]) -> Response:
        fields = JsonFields(body)
        run, seq = fields.take("model_id", str), fields.take("seq_id", int)
        return await self._accepted(run, seq, kind, json.dumps(body).encode())

    async def _accepted(self, run: str, seq: int, kind: str, body: bytes) -> Response:
        request_id = await asyncio.to_thread(self.service.submit, run, seq, kind, body)
        return JSONResponse({"request_id": request_id, "model_id": run})

    async def create_sampler(self, request: Request) -> Response:
        """A sampler of a base or of saved weights."""
        fields = JsonFields(await _body(request))
        session = fields.take("session_id", str)
        number = fields.take("sampling_session_seq_id", int)
        base, path = fields.take("base_model", str, None), fields.take("model_path", str, None)
        create = partial(self.service.create_sampler, session, number, base=base, path=path)
        sampler = await asyncio.to_thread(create)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def join_sampler(self, request: Request) -> Response:
        """A number for one more client of a sampler."""
        sampler = JsonFields(await _body(request)).take("sampling_session_id", str)
        count = self.service.join_sampler(sampler)
        return JSONResponse({"type": "join_sampling_session", "client_counter": count})

    def show_sampler(self, request: Request) -> Response:
        """What a sampler is."""
        sampler = request.path_params["sampler"]
        facts = self.service.sampler(sampler)
        shown = {key: facts.get(key) for key in ("base_model", "model_path")}
        return JSONResponse({"sampler_id": sampler, **shown})

    async def sample(self, request: Request) -> Response:
        """Answers to a prompt."""
        body = await _body(request)
        request_id, count = await asyncio.to_thread(self.service.sample, body)
        ids = [f"{request_id}:{number}" for number in range(count)]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    async def retrieve(self, request: Request) -> Response:
        """What a request has given, as soon as it has."""
        request_id = JsonFields(await _body(request)).take("request_id", str)
        try:
            future = self.service.future(request_id)
        except NotFoundError as error:
            # Clients send a request for samples anew then.
            raise ApiError(410, str(error)) from error
        waiting = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([waiting], timeout=POLL_SECONDS)
        if not done:
            return JSONResponse({"queue_state": "active", "request_id": request_id}, 408)
        result = future.result()
        return Response(result.body, media_type=result.media_type)

    async def cancel(self, request: Request) -> Response:
        """Give up a request for samples."""
        self.service.cancel(JsonFields(await _body(request)).take("request_id", str))
        return JSONResponse({})

    # What is kept

    def list_runs(self, request: Request) -> Response:
        """All runs, the newest first."""
        runs = sorted([*self.service.runs.values()], key=lambda r: r.facts["created"], reverse=True)
        page, cursor = _page(request, [_run_facts(run) for run in runs], 20)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    def show_run(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(_run_facts(self.service.run(request.path_params["run"])))

    def list_weights(self, request: Request) -> Response:
        """Saved weights, of a run or of all."""
        name = request.path_params.get("run")
        runs = [*self.service.runs.values()] if name is None else [self.service.run(name)]
        found = [each for run in runs for each in _checkpoints(run)]
        page, cursor = _page(request, found, 100)
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    def _weights(self, request: Request, *, expired: bool = False) -> tuple[TrainingRun, Weights]:
        """The run and the weights that a path names; with ``expired`` those of old too."""
        run = self.service.run(request.path_params["run"])
        kind, name = request.path_params["kind"], request.path_params["name"]
        if kind not in KINDS:
            raise ApiError(404, f"there are no {kind!r:.80}, but {', '.join(KINDS)}")
        weights = run.store.weights(kind, name)
        place = run.store.place(weights)
        if not place.is_dir() or (kept_facts(place) is None and not expired):
            raise NotFoundError(f"{run.run} has no {kind}/{name}")
        return run, weights

    def delete_weights(self, request: Request) -> Response:
        """Delete saved weights."""
        run, weights = self._weights(request, expired=True)
        run.store.delete(weights)
        return JSONResponse({})

    async def set_time(self, request: Request) -> Response:
        """How long saved weights stay."""
        ends = end_of_time(JsonFields(await _body(request)).take("ttl_seconds", int, None))
        return await asyncio.to_thread(self._change, request, expires_at=ends)

    def publish(self, request: Request) -> Response:
        """Mark saved weights as public, or no longer: who may ask stays the same here."""
        return self._change(request, public=request.method == "POST")

    def _change(self, request: Request, **facts: Any) -> Response:
        run, weights = self._weights(request)
        run.store.change(weights, **facts)
        return JSONResponse({})

    def urls(self, request: Request) -> Response:
        """Where each file of saved weights can be had for an hour, by anybody who has the URL."""
        run, weights = self._weights(request)
        place = run.store.place(weights)
        ends = int(time.time()) + LINK_SECONDS
        root = f"{request.scope['scheme']}://{request.headers['host']}"
        where = f"{run.run}/{weights.kind}/{weights.name}"
        files = {path.name for path in place.iterdir() if path.is_file()} - {CHECKPOINT_FILE}
        urls = {name: root + self.links.of(f"{where}/{name}", ends) for name in files}
        expires = datetime.fromtimestamp(ends, UTC)
        return JSONResponse({"urls": urls, "expires": expires.isoformat()})

    def file(self, request: Request) -> Response:
        """One of those files."""
        if request.scope["path"] not in self.links:
            raise ApiError(403, "this URL is not valid any more; ask for another one")
        run, weights = self._weights(request)
        file = run.store.place(weights) / request.path_params["file"]
        if not file.is_file():
            raise NotFoundError(f"{run.run} has no {file.name} there any more")
        return FileResponse(file)

    async def weights_info(self, request: Request) -> Response:
        """What saved weights are of."""
        path = JsonFields(await _body(request)).take("tinker_path", str)
        run, _ = await asyncio.to_thread(self.service.source, path, "tinker_path")
        how = vars(run.how)
        named = {key: how[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        facts = {"base_model": run.base.name, "is_lora": True, "lora_rank": how["rank"]}
        return JSONResponse({**facts, **named})

    def list_sessions(self, request: Request) -> Response:
        """Ids of all sessions, the newest first."""
        page, _ = _page(request, [*reversed(self.service.sessions)], 20)
        return JSONResponse({"sessions": page})

    def show_session(self, request: Request) -> Response:
        """Runs and samplers of a session."""
        session = request.path_params["session"]
        facts, own = self.service.session(session), f"{session}:"
        return JSONResponse(
            {
                "training_run_ids": [n for n in [*self.service.runs] if n.startswith(own)],
                "sampler_ids": [n for n in [*self.service.samplers] if n.startswith(own)],
                "user_metadata": facts.get("user_metadata") or None,
                "display_name": facts.get("display_name"),
            }
        )


def _run_facts(run: TrainingRun) -> dict[str, Any]:
    kept = _checkpoints(run)
    last: dict[str, Any] = {each["checkpoint_type"]: each for each in kept}
    return {
        "training_run_id": run.run,
        "base_model": run.base.name,
        "model_owner": OWNER,
        "is_lora": True,
        "lora_rank": run.how.rank,
        "last_request_time": run.facts["last_request"],
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": run.facts["user_metadata"],
    }


def _checkpoints(run: TrainingRun) -> list[dict[str, Any]]:
    return [
        {
            "checkpoint_id": f"{weights.kind}/{weights.name}",
            "checkpoint_type": KINDS[weights.kind],
            "time": facts["time"],
            "tinker_path": weights.path,
            "size_bytes": size_of(run.store.place(weights)),
            "public": facts.get("public", False),
            "user_metadata": facts.get("user_metadata"),
            "expires_at": facts.get("expires_at"),
        }
        for weights, facts in run.store.all_weights()
    ]


def _page(request: Request, items: list[Any], limit: int) -> tuple[list[Any], dict[str, int]]:
    """The part of a list that ``limit`` and ``offset`` ask for."""
    query = request.query_params
    try:
        limit, offset = int(query.get("limit", limit)), int(query.get("offset", 0))
    except ValueError as error:
        raise invalid("limit and offset must be whole numbers") from error
    if limit < 0 or offset < 0:
        raise invalid("limit and offset must be 0 or more")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return items[offset : offset + limit], cursor


async def _body(request: Request) -> dict[str, Any]:
    found = await read_json(request)
    if not isinstance(found, dict):
        raise invalid(f"the body must be an object, got {found!r:.80}")
    return found


def _check_version(fields: JsonFields) -> None:
    version = fields.take("sdk_version", str, None)
    if version is not None and not f"{version}.".startswith(f"{CLIENT_VERSION}."):
        raise ValueError(
            f"sdk_version is {version!r:.40}, and this server speaks the protocol of tinker "
            f"{CLIENT_VERSION}: pip install 'tinker=={CLIENT_VERSION}.*'"
        )


async def _config(request: Request) -> Response:
    """How clients are to behave; the first thing that they ask for."""
    _check_version(JsonFields(await _body(request)))
    return JSONResponse({})


async def _constant(request: Request) -> Response:
    """What has the same answer each time; what is sent is thrown away."""
    await request.body()
    answers: dict[str, dict[str, Any]] = {
        "healthz": {"status": "ok"},
        "telemetry": {"status": "accepted"},
        "dynamic_config": {"sample_cancel_enabled": True},
    }
    return JSONResponse(answers[request.url.path.rpartition("/")[2]])


async def _not_built(request: Request) -> Response:
    what = request.url.path.removeprefix(f"{API}/")
    raise ApiError(404, f"{what[:80]} is not built here, or does not exist")


async def _refuse(request: Request, error: Exception) -> Response:
    status = {NotFoundError: 404, BusyError: 429}.get(type(error), 400)
    return JSONResponse({"detail": " ".join(str(error).split())}, status)


async def _refuse_request(request: Request, error: ApiError) -> Response:
    return JSONResponse({"detail": error.body["error"]["message"]}, error.status)


def make_app(service: TinkerService, *, host: str, token: str | None) -> Starlette:
    """The application of a service that is started."""
    links = Links()
    routes, post = Routes(service, links), ["POST"]
    checkpoint = "/training_runs/{run}/checkpoints/{kind}/{name}"
    table: list[tuple[str, Answer, list[str]]] = [
        ("/healthz", _constant, ["GET"]),
        ("/telemetry", _constant, post),
        ("/client/config", _config, post),
        ("/client/dynamic_config", _constant, post),
        ("/get_server_capabilities", routes.capabilities, ["GET"]),
        ("/create_session", routes.create_session, post),
        ("/session_heartbeat", routes.heartbeat, post),
        ("/sessions", routes.list_sessions, ["GET"]),
        ("/sessions/{session}", routes.show_session, ["GET"]),
        ("/sessions/{session}/finish", routes.finish, post),
        ("/create_model", routes.create_model, post),
        ("/load_weights", routes.load, post),
        ("/get_info", routes.info, post),
        ("/forward_backward", routes.forward_backward, post),
        ("/optim_step", routes.of_run("optim_step"), post),
        *(
            (f"/save_weights{kind}", routes.of_run(f"save_weights{kind}"), post)
            for kind in ("", "_for_sampler", "_external")
        ),
        ("/create_sampling_session", routes.create_sampler, post),
        ("/join_sampling_session", routes.join_sampler, post),
        ("/samplers/{sampler}", routes.show_sampler, ["GET"]),
        ("/asample", routes.sample, post),
        ("/retrieve_future", routes.retrieve, post),
        ("/cancel_future", routes.cancel, post),
        ("/weights_info", routes.weights_info, post),
        ("/training_runs", routes.list_runs, ["GET"]),
        ("/training_runs/{run}", routes.show_run, ["GET"]),
        ("/training_runs/{run}/checkpoints", routes.list_weights, ["GET"]),
        ("/checkpoints", routes.list_weights, ["GET"]),
        (checkpoint, routes.delete_weights, ["DELETE"]),
        (f"{checkpoint}/ttl", routes.set_time, ["PUT"]),
        (f"{checkpoint}/publish", routes.publish, ["POST", "DELETE"]),
        (f"{checkpoint}/external_weights_urls", routes.urls, ["GET"]),
        (LINKS + "/{ends}/{signature}/{run}/{kind}/{name}/{file}", routes.file, ["GET"]),
        ("/{rest:path}", _not_built, ["GET", "POST", "PUT", "DELETE"]),
    ]
    handlers: dict[Any, Any] = {
        **HANDLERS,
        ApiError: _refuse_request,
        **dict.fromkeys((ValueError, NotFoundError, BusyError), _refuse),
    }
    return guarded_app(
        [Route(f"{API}{path}", answer, methods=how) for path, answer, how in table],
        host=host,
        token=token,
        public=links,
        handlers=handlers,
        most=lambda path: MAX_MESSAGE_BYTES if path == MESSAGES else MAX_BODY_BYTES,
    )


def run_server(
    config: TinkerConfig, sources: Mapping[str, ModelSource], listening: socket.socket | None
) -> None:
    """Serve on a listening socket until a signal comes; call on every rank of a launch.

    Rank 0 has the socket; the others compute what it asks for.

    Raises:
        ValueError: if a base cannot be loaded, or another server has the directory.
        OSError: if the thread that computes ends by itself.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        init_distributed()
        on_loss(lambda _: "start it again with the same --state_dir, and it goes on")
    bases = {
        source.base: open_base(
            source.base, source, config.model, recomputes=config.gradient_checkpointing
        )
        for source in sources.values()
    }
    directory = Path(config.state_dir).expanduser().resolve()
    if listening is None:
        # A launcher sends them to all. Rank 0's server ends by them, the others when it says so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow(
            Worker(
                bases,
                Store(directory),
                tokens_per_device=config.tokens_per_device,
                zero_stage=config.zero_stage,
            )
        )
    else:
        with alone(directory, "server", option="state_dir"):
            _serve(config, bases, sources, directory, listening)
    shutdown()


def _serve(
    config: TinkerConfig,
    bases: Mapping[str, Base],
    sources: Mapping[str, ModelSource],
    directory: Path,
    listening: socket.socket,
) -> None:
    service = TinkerService(
        bases,
        Store(directory),
        max_adapters=config.max_adapters,
        max_queue=config.max_queue,
        max_batch_size=config.max_batch_size,
        tokens_per_device=config.tokens_per_device,
        zero_stage=config.zero_stage,
        state_every=config.state_every,
        aliases={word: source.base for word, source in sources.items()},
    )
    address, waiting = address_of(listening), sum(len(r.waiting) for r in service.runs.values())

    def say() -> None:
        log_once(f"{', '.join(bases)} at {address} (the Tinker API); Ctrl-C ends")
        key = "tml-local" if config.token is None else "the --token"
        log_once(f"clients: TINKER_BASE_URL={address} and {key} as TINKER_API_KEY")
        if service.runs:
            log_once(f"{directory}: {len(service.runs)} runs go on, {waiting} requests wait")

    app = make_app(service, host=config.host, token=config.token)
    server = HttpServer(app, timeout_graceful_shutdown=2)
    service.start(on_failure=lambda: setattr(server, "should_exit", True))
    try:
        run_until_signal(server, listening, say)
    finally:
        service.close()
    if service.failure is not None:
        raise OSError(service.failure)
    service.worker.channel.send()
    log_once(f"stopped at {now()[:19]}")
