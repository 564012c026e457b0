"""The Tinker API over HTTP: its routes, and what is answered at each."""

import asyncio
import hmac
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from dschat_lora.addons.serving.endpoint.errors import ApiError, BusyError, invalid
from dschat_lora.addons.serving.endpoint.guard import HANDLERS, read_json
from dschat_lora.addons.serving.endpoint.http_server import make_app as guarded_app
from dschat_lora.addons.tinker.adapters import CHECKPOINT_FILE
from dschat_lora.addons.tinker.formats import JsonFields, parse_message
from dschat_lora.addons.tinker.registry import Registry, TrainingRun, known
from dschat_lora.addons.tinker.requests import NotFoundError
from dschat_lora.addons.tinker.service import SAVED, TinkerService
from dschat_lora.addons.tinker.store import (
    KINDS,
    Facts,
    RunStore,
    Weights,
    end_of_time,
    kept_facts,
    size_of,
)

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
ItemT = TypeVar("ItemT")


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
    """What answers requests over HTTP: by the fields of a body and the parts of a path."""

    service: TinkerService
    links: Links

    @property
    def registry(self) -> Registry:
        """Of the service."""
        return self.service.registry

    def capabilities(self, request: Request) -> Facts:
        """The bases."""
        can = {"trainable": True, "sampleable": True}
        bases = self.registry.bases.items()
        models = [{"model_name": n, "max_context_length": b.limit, **can} for n, b in bases]
        return {"supported_models": models}

    def create_session(self, fields: JsonFields) -> Facts:
        """A new session."""
        check_version(fields)
        kept = {
            "user_metadata": fields.texts("user_metadata"),
            "display_name": fields.take("display_name", str, None),
            "tags": fields.take("tags", list, None),
        }
        return {"session_id": self.registry.create_session(kept)}

    def heartbeat(self, fields: JsonFields) -> Facts:
        """A session never ends by itself."""
        known(self.registry.sessions, "there is no session", fields.take("session_id", str))
        return {"type": "session_heartbeat"}

    def finish(self, fields: JsonFields, session: str) -> Facts:
        """How a session ended."""
        self.registry.finish_session(session, fields.rest.get("reason"))
        return {}

    def create_model(self, fields: JsonFields) -> Facts:
        """A new adapter."""
        session, number = fields.take("session_id", str), fields.take("model_seq_id", int)
        for name in ("type", "weights_access_token"):
            fields.rest.pop(name, None)
        return _accepted(self.service.create_run(session, number, fields.rest))

    def load(self, fields: JsonFields) -> Facts:
        """A new adapter from saved weights, or others into one that is there."""
        if fields.rest.get("session_id") is not None:
            return self.create_model(fields)
        return self.submit("load_weights", fields)

    def submit(self, kind: str, fields: JsonFields) -> Facts:
        """A request of a run."""
        run, seq = fields.take("model_id", str), fields.take("seq_id", int)
        body = json.dumps(fields.rest).encode()
        return _accepted(self.service.submit(run, seq, kind, body))

    async def forward_backward(self, request: Request) -> Response:
        """A loss of examples, and its gradient."""
        body = await request.body()

        def submit() -> Facts:
            message = parse_message(body)
            run, seq = str(message.model_id), int(message.seq_id)
            return _accepted(self.service.submit(run, seq, "forward_backward", body))

        return JSONResponse(await asyncio.to_thread(submit))

    def info(self, fields: JsonFields) -> Facts:
        """What a model is."""
        run = self._run(fields.take("model_id", str))
        name, tokenizer = {"model_name": run.base.name}, run.base.source.tokenizer
        data = {"arch": type(run.base.model).__name__, **name, "tokenizer_id": tokenizer}
        facts = {"model_id": run.run, "is_lora": True, "lora_rank": run.how.rank, **name}
        return {"type": "get_info", "model_data": data, **facts}

    def _run(self, name: str) -> TrainingRun:
        return known(self.registry.runs, "there is no model", name, 120)

    def create_sampler(self, fields: JsonFields) -> Facts:
        """A sampler of a base or of saved weights."""
        sampler = self.registry.create_sampler(
            fields.take("session_id", str),
            fields.take("sampling_session_seq_id", int),
            base=fields.take("base_model", str, None),
            path=fields.take("model_path", str, None),
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def join_sampler(self, fields: JsonFields) -> Facts:
        """A number for one more client of a sampler."""
        count = self.registry.join_sampler(fields.take("sampling_session_id", str))
        return {"type": "join_sampling_session", "client_counter": count}

    def show_sampler(self, request: Request, sampler: str) -> Facts:
        """What a sampler is."""
        facts = known(self.registry.samplers, "there is no sampler", sampler)
        return {"sampler_id": sampler, **{n: facts.get(n) for n in ("base_model", "model_path")}}

    def sample(self, fields: JsonFields) -> Facts:
        """Answers to a prompt."""
        request_id, count = self.service.sample(fields.rest)
        ids = [f"{request_id}:{number}" for number in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def retrieve(self, request: Request) -> Response:
        """What a request has given, as soon as it has."""
        request_id = JsonFields(await read_json(request)).take("request_id", str)
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

    def cancel(self, fields: JsonFields) -> Facts:
        """Give up a request for samples."""
        self.service.cancel(fields.take("request_id", str))
        return {}

    # What is kept

    def list_runs(self, request: Request) -> Facts:
        """All runs, the newest first."""
        runs = sorted([*self.registry.runs.values()], key=lambda r: r.facts["created"])
        page, cursor = _page(request, [_run_facts(run) for run in reversed(runs)], 20)
        return {"training_runs": page, "cursor": cursor}

    def show_run(self, request: Request, run: str) -> Facts:
        """One of them."""
        return _run_facts(self._run(run))

    def list_weights(self, request: Request, run: str | None = None) -> Facts:
        """Saved weights, of a run or of all."""
        runs = [*self.registry.runs.values()] if run is None else [self._run(run)]
        page, cursor = _page(request, [each for own in runs for each in _checkpoints(own)], 100)
        return {"checkpoints": page, "cursor": cursor}

    def _weights(self, run: str, kind: str, name: str) -> tuple[RunStore, Weights, Path]:
        """Saved weights that a path names, of old ones too, and where they are."""
        if kind not in KINDS:
            raise ApiError(404, f"there are no {kind!r:.80}, but {', '.join(KINDS)}")
        store = self._run(run).store
        weights = store.weights(kind, name)
        place = store.place(weights)
        if not place.is_dir():
            raise NotFoundError(f"{run} has no {kind}/{name}")
        return store, weights, place

    def _kept_weights(self, run: str, kind: str, name: str) -> tuple[RunStore, Weights, Path]:
        """Those whose time is not over."""
        store, weights, place = self._weights(run, kind, name)
        if kept_facts(place) is None:
            raise NotFoundError(f"{run} has no {kind}/{name}")
        return store, weights, place

    def delete_weights(self, request: Request, **named: str) -> Facts:
        """Delete saved weights."""
        store, weights, _ = self._weights(**named)
        store.delete(weights)
        return {}

    def set_time(self, fields: JsonFields, **named: str) -> Facts:
        """How long saved weights stay."""
        ends = end_of_time(fields.take("ttl_seconds", int, None))
        store, weights, _ = self._kept_weights(**named)
        store.change(weights, expires_at=ends)
        return {}

    def publish(self, request: Request, **named: str) -> Facts:
        """Mark saved weights as public, or no longer: who may ask stays the same here."""
        store, weights, _ = self._kept_weights(**named)
        store.change(weights, public=request.method == "POST")
        return {}

    def urls(self, request: Request, **named: str) -> Facts:
        """Where each file of saved weights can be had for an hour, by anybody who has the URL."""
        _, weights, place = self._kept_weights(**named)
        ends = int(time.time()) + LINK_SECONDS
        root = f"{request.scope['scheme']}://{request.headers['host']}"
        where = f"{weights.run}/{weights.kind}/{weights.name}"
        files = {path.name for path in place.iterdir() if path.is_file()} - {CHECKPOINT_FILE}
        urls = {name: root + self.links.of(f"{where}/{name}", ends) for name in files}
        return {"urls": urls, "expires": datetime.fromtimestamp(ends, UTC).isoformat()}

    def file(self, request: Request) -> Response:
        """One of those files."""
        if request.scope["path"] not in self.links:
            raise ApiError(403, "this URL is not valid any more; ask for another one")
        run, kind, name, file = (request.path_params[n] for n in ("run", "kind", "name", "file"))
        path = self._kept_weights(run, kind, name)[2] / file
        if not path.is_file():
            raise NotFoundError(f"{run} has no {file} there any more")
        return FileResponse(path)

    def weights_info(self, fields: JsonFields) -> Facts:
        """What saved weights are of."""
        run, _ = self.registry.source(fields.take("tinker_path", str), "tinker_path")
        how = {**vars(run.how), "is_lora": True, "base_model": run.base.name}
        del how["seed"]
        return {"lora_rank": how.pop("rank"), **how}

    def list_sessions(self, request: Request) -> Facts:
        """Ids of all sessions, the newest first."""
        page, _ = _page(request, [*reversed(self.registry.sessions)], 20)
        return {"sessions": page}

    def show_session(self, request: Request, session: str) -> Facts:
        """Runs and samplers of a session."""
        facts = known(self.registry.sessions, "there is no session", session)
        runs, samplers = (
            [name for name in [*table] if name.startswith(f"{session}:")]
            for table in (self.registry.runs, self.registry.samplers)
        )
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": facts.get("user_metadata") or None,
            "display_name": facts.get("display_name"),
        }


def _accepted(request_id: str) -> Facts:
    return {"request_id": request_id, "model_id": request_id.rpartition(":")[0]}


def _run_facts(run: TrainingRun) -> Facts:
    last = {each["checkpoint_type"]: each for each in _checkpoints(run)}
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


def _checkpoints(run: TrainingRun) -> list[Facts]:
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


def _page(request: Request, items: list[ItemT], limit: int) -> tuple[list[ItemT], dict[str, int]]:
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


def posted(answer: Callable[..., Facts]) -> Answer:
    """Answers by the fields of a body and the parts of the path, in a thread."""

    async def respond(request: Request) -> Response:
        fields = JsonFields(await read_json(request))
        return JSONResponse(await asyncio.to_thread(answer, fields, **request.path_params))

    return respond


def shown(answer: Callable[..., Facts]) -> Answer:
    """Answers by the request without a body and the parts of its path, in a thread."""
    return lambda request: JSONResponse(answer(request, **request.path_params))


def constant(**content: object) -> Answer:
    """Has the same answer each time; what is sent is thrown away."""

    async def respond(request: Request) -> Response:
        await request.body()
        return JSONResponse(content)

    return respond


def check_version(fields: JsonFields) -> Facts:
    """Refuse a client of another protocol; how others are to behave: as they do by themselves."""
    version = fields.take("sdk_version", str, None)
    if version is not None and not f"{version}.".startswith(f"{CLIENT_VERSION}."):
        raise ValueError(
            f"sdk_version is {version!r:.40}, and this server speaks the protocol of tinker "
            f"{CLIENT_VERSION}: pip install 'tinker=={CLIENT_VERSION}.*'"
        )
    return {}


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
    routes = Routes(service, links)
    checkpoint = "/training_runs/{run}/checkpoints/{kind}/{name}"
    posts: dict[str, Callable[..., Facts]] = {
        "/client/config": check_version,
        "/create_session": routes.create_session,
        "/session_heartbeat": routes.heartbeat,
        "/sessions/{session}/finish": routes.finish,
        "/create_model": routes.create_model,
        "/load_weights": routes.load,
        "/get_info": routes.info,
        **{f"/{n}": partial(routes.submit, n) for n in ("optim_step", *SAVED)},
        "/create_sampling_session": routes.create_sampler,
        "/join_sampling_session": routes.join_sampler,
        "/asample": routes.sample,
        "/cancel_future": routes.cancel,
        "/weights_info": routes.weights_info,
    }
    gets: dict[str, Callable[..., Facts]] = {
        "/get_server_capabilities": routes.capabilities,
        "/sessions": routes.list_sessions,
        "/sessions/{session}": routes.show_session,
        "/samplers/{sampler}": routes.show_sampler,
        "/training_runs": routes.list_runs,
        "/training_runs/{run}": routes.show_run,
        "/training_runs/{run}/checkpoints": routes.list_weights,
        "/checkpoints": routes.list_weights,
        f"{checkpoint}/external_weights_urls": routes.urls,
    }
    table: list[tuple[str, Answer, tuple[str, ...]]] = [
        ("/healthz", constant(status="ok"), ("GET",)),
        ("/telemetry", constant(status="accepted"), ("POST",)),
        ("/client/dynamic_config", constant(sample_cancel_enabled=True), ("POST",)),
        *((path, posted(answer), ("POST",)) for path, answer in posts.items()),
        *((path, shown(answer), ("GET",)) for path, answer in gets.items()),
        ("/forward_backward", routes.forward_backward, ("POST",)),
        ("/retrieve_future", routes.retrieve, ("POST",)),
        (checkpoint, shown(routes.delete_weights), ("DELETE",)),
        (f"{checkpoint}/ttl", posted(routes.set_time), ("PUT",)),
        (f"{checkpoint}/publish", shown(routes.publish), ("POST", "DELETE")),
        (LINKS + "/{ends}/{signature}/{run}/{kind}/{name}/{file}", routes.file, ("GET",)),
        ("/{rest:path}", _not_built, ("GET", "POST", "PUT", "DELETE")),
    ]
    refused = dict.fromkeys((ValueError, NotFoundError, BusyError), _refuse)
    return guarded_app(
        [Route(f"{API}{path}", answer, methods=how) for path, answer, how in table],
        host=host,
        token=token,
        public=links,
        handlers={**HANDLERS, ApiError: _refuse_request, **refused},
        most=lambda path: MAX_MESSAGE_BYTES if path == MESSAGES else MAX_BODY_BYTES,
    )
