"""The service: sessions, runs that train, samplers, and the one thread that computes for them.

Requests of a run are worked off in the order of their numbers, those of several runs and samplers
in turns. What a run computes depends on its own requests alone, not on what comes between them.
"""

import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from dschat_lora.addons.serving.endpoint.answers import BusyError
from dschat_lora.addons.tinker.adapters import CHECKPOINT_FILE, Adapting, Base, TrainedAdapter
from dschat_lora.addons.tinker.formats import (
    JSON,
    PROTOBUF,
    JsonFields,
    adam_params,
    adapting,
    content_of,
    forward_backward_output,
    sample_request,
)
from dschat_lora.addons.tinker.processes import FULL
from dschat_lora.addons.tinker.samplers import SampleRequest
from dschat_lora.addons.tinker.store import UNNAMED, RunStore, Store, Weights, now, parse_path
from dschat_lora.addons.tinker.worker import SampleBody, Worker
from dschat_lora.engine.distributed import world_size
from dschat_lora.report.terminal import note

Category = Literal["user", "server"]
KEPT_BYTES = 2**28  # of samples that may be asked for once more
MOST_NUMBER = 2**31 - 1  # of a request or a model
# Seconds after which a number that has not come is taken as lost: clients send the parts of one
# forward_backward side by side, and anything else once all before it was answered or given up.
LOST_PART_SECONDS, LOST_SECONDS = 60.0, 2.0


class NotFoundError(Exception):
    """Nothing of this name is here."""


@dataclass(frozen=True)
class Result:
    """What a request has given; an ``error`` has a category."""

    body: bytes
    media_type: str = JSON
    error: Category | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Result":
        """A JSON object."""
        return cls(json.dumps(content).encode())

    @classmethod
    def failure(cls, error: object, category: Category) -> "Result":
        """A request that failed."""
        message = " ".join(str(error).split())
        return replace(cls.of({"error": message, "category": category}), error=category)


@dataclass(frozen=True, eq=False)
class Job:
    """A request that was accepted."""

    request_id: str
    kind: str
    body: bytes
    future: "Future[Result]" = field(default_factory=Future)
    sample: SampleRequest | None = None
    sample_body: SampleBody | None = None


@dataclass(eq=False)
class TrainingRun:
    """A model that trains, by its requests.

    Attributes:
        facts: what its directory says of it.
        done: number of the last request that was worked off.
        saved: that after which its state was written.
        waiting: requests by number.
        arrived: when a request came last.
    """

    run: str
    base: Base
    store: RunStore
    facts: dict[str, Any]
    done: int = -1
    saved: int = -1
    waiting: dict[int, Job] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def how(self) -> Adapting:
        """Which layers train."""
        return Adapting(**self.facts["lora"])


class TinkerService:
    """What answers requests; its methods but :meth:`work` may be called from any thread.

    Args:
        bases: by the names that requests know them by.
        store: where all is kept.
        max_adapters: most adapters in memory, those in training and those of samplers each.
        max_queue: most requests that wait.
        max_batch_size: most answers that are decoded at a time.
        tokens_per_device, zero_stage: of :class:`Worker`.
        state_every: steps of a run after which its state is written; what was sent since is then
            computed again where it is needed.
        aliases: other names of bases.
    """

    def __init__(
        self,
        bases: Mapping[str, Base],
        store: Store,
        *,
        max_adapters: int = 16,
        max_queue: int = 4096,
        max_batch_size: int = 64,
        tokens_per_device: int = 16384,
        zero_stage: int = 0,
        state_every: int = 1,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.bases, self.store = bases, store
        self.worker = Worker(
            bases, store, tokens_per_device=tokens_per_device, zero_stage=zero_stage
        )
        self._aliases = aliases
        self._state_every = state_every
        self._max_adapters, self._max_queue = max_adapters, max_queue
        self._max_batch_size = max_batch_size * world_size()
        self.sessions = store.table("sessions")
        self.samplers = store.table("samplers")
        self.runs: dict[str, TrainingRun] = {}
        self._futures: dict[str, Future[Result]] = {}
        self._samples: OrderedDict[str, int] = OrderedDict()  # bytes of those that are done
        self._sample_bytes = 0  # of all of them
        self._queues: dict[str, list[Job]] = {}  # of samplers
        self._turns: list[str] = []  # runs and samplers, the one whose turn is next first
        self._changed = threading.Condition()
        self._closed = False
        self.failure: str | None = None
        self._thread: threading.Thread | None = None
        for each in store.runs():
            self._open(each)

    def _open(self, store: RunStore) -> None:
        """A run that was here before, with the requests that it had accepted."""
        facts = store.facts()
        if facts["base_model"] not in self.bases:
            note(f"{store.run} is left out: its base {facts['base_model']} is not served")
            return
        run = TrainingRun(store.run, self.bases[facts["base_model"]], store, facts)
        if (state := store.state_facts()) is not None:
            run.done = run.saved = state["seq"]
        self.runs[run.run] = run
        self._turns.append(run.run)
        logged = [each for each in store.logged() if each[0] > run.saved]
        for seq, _, _ in logged:  # those that have a result are not worked off again
            if store.result(seq) is not None:
                run.done = seq
        for seq, kind, body in logged:
            if seq > run.done:
                self._enqueue(run, seq, kind, body)

    # Sessions and samplers

    def create_session(self, facts: Mapping[str, Any]) -> str:
        """A new session."""
        session = str(uuid.uuid4())
        with self._changed:
            self.sessions[session] = {**facts, "created_at": now()}
            self.store.write_table("sessions", self.sessions)
        return session

    def session(self, session: str) -> dict[str, Any]:
        """Facts of a session."""
        if session not in self.sessions:
            raise NotFoundError(f"there is no session {session!r:.80}")
        found: dict[str, Any] = self.sessions[session]
        return found

    def finish_session(self, session: str, reason: object) -> None:
        """Note how a session ended; the first reason stays."""
        with self._changed:
            self.session(session).setdefault("finished", reason)
            self.store.write_table("sessions", self.sessions)

    def create_sampler(
        self, session: str, number: int, *, base: str | None, path: str | None
    ) -> str:
        """The sampler of a base, or of saved weights.

        Raises:
            ValueError: if neither is named, or what is named is not here.
        """
        self.session(session)
        if path is not None:
            base = self.source(path, "model_path")[0].facts["base_model"]
        if base is None:
            raise ValueError("a sampler needs base_model or model_path")
        sampler = f"{session}:sample:{number}"
        self._put_sampler(sampler, {"base_model": self.base(base).name, "model_path": path})
        return sampler

    def _put_sampler(self, sampler: str, facts: Mapping[str, Any]) -> None:
        with self._changed:
            self.samplers[sampler] = dict(facts)
            self.store.write_table("samplers", self.samplers)

    def sampler(self, sampler: str) -> dict[str, Any]:
        """Facts of a sampler."""
        if sampler not in self.samplers:
            raise NotFoundError(f"there is no sampler {sampler!r:.80}")
        found: dict[str, Any] = self.samplers[sampler]
        return found

    def join_sampler(self, sampler: str) -> int:
        """A number for one more client of a sampler."""
        with self._changed:
            facts = self.sampler(sampler)
            facts["clients"] = facts.get("clients", 0) + 1
            self.store.write_table("samplers", self.samplers)
            count: int = facts["clients"]
            return count

    def base(self, name: str) -> Base:
        """A base by its name.

        Raises:
            ValueError: if it is not here.
        """
        name = self._aliases.get(name, name)
        if name not in self.bases:
            raise ValueError(f"base_model must be one of {', '.join(self.bases)}, got {name!r:.80}")
        return self.bases[name]

    def run(self, run: str) -> TrainingRun:
        """A run by its model's id.

        Raises:
            NotFoundError: if it is not here.
        """
        if run not in self.runs:
            raise NotFoundError(f"there is no model {run!r:.120}")
        return self.runs[run]

    # Requests

    def create_run(self, session: str, number: int, body: Mapping[str, Any]) -> str:
        """Accept ``create_model``, or ``load_weights`` that makes a model; the request's id.

        Raises:
            ValueError: if it cannot be made.
        """
        self.session(session)
        if not 0 <= number <= MOST_NUMBER:
            raise ValueError(f"model_seq_id must be from 0 to {MOST_NUMBER}")
        run, content = f"{session}:train:{number}", json.dumps(dict(body)).encode()
        if run in self.runs:  # asked for once more
            return self.submit(run, 0, "create_model", content)
        fields = JsonFields(body)
        optimizer = fields.take("optimizer_config", dict, None) or {"type": "adamw"}
        if optimizer.get("type") != "adamw":
            raise ValueError(f"optimizer_config must be adamw, got {optimizer.get('type')!r:.80}")
        path = fields.take("path", str, None)
        if path is None:
            base = self.base(fields.take("base_model", str))
            how = adapting(fields.take("lora_config", dict, None))
            base.lora_of(how)  # refused here, before there is a run
        else:
            source, _ = self.source(path)
            base, how = source.base, source.how
            asked = fields.take("base_model", str, base.name)
            if self.base(asked) is not base:
                raise ValueError(f"base_model is {asked!r:.80}, and the weights are of {base.name}")
        facts = {
            "model_id": run,
            "base_model": base.name,
            "lora": vars(how),
            "user_metadata": fields.texts("user_metadata"),
            "session": session,
            "created": now(),
            "last_request": now(),
        }
        store = self.store.run(run)
        with self._changed:
            if run not in self.runs:  # where the same request came twice at once
                store.create(facts)
                self.runs[run] = TrainingRun(run, base, store, facts)
                self._turns.append(run)
        return self.submit(run, 0, "create_model", content)

    def submit(self, run: str, seq: int | None, kind: str, body: bytes) -> str:
        """Accept a request of a run; its id. One that comes once more is the same request.

        Raises:
            NotFoundError: if there is no such run.
            ValueError: without a number.
            BusyError: if too many wait.
        """
        found = self.run(run)
        if seq is None or (seq < 1 and kind != "create_model"):
            raise ValueError(f"seq_id must be a whole number from 1 on, got {seq}")
        if seq > MOST_NUMBER:
            raise ValueError(f"seq_id must be at most {MOST_NUMBER}")
        request_id = f"{run}:{seq}"
        with self._changed:
            if seq > found.done and seq not in found.waiting:
                if seq != found.done + 1:  # for which others may wait
                    self._check_room()
                found.store.log(seq, kind, body)
                self._enqueue(found, seq, kind, body)
                found.arrived, found.facts["last_request"] = time.monotonic(), now()
                self._changed.notify_all()
        return request_id

    def _enqueue(self, run: TrainingRun, seq: int, kind: str, body: bytes) -> None:
        job = Job(f"{run.run}:{seq}", kind, body)
        run.waiting[seq] = job
        self._futures[job.request_id] = job.future

    def _check_room(self) -> None:
        if self._closed:
            raise BusyError("the service is ending")
        waiting = sum(len(run.waiting) for run in self.runs.values())
        if waiting + sum(len(queue) for queue in self._queues.values()) >= self._max_queue:
            raise BusyError(f"{self._max_queue} requests wait already; ask again later")

    def sample(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """Accept ``asample``; the request's id, and how many answers it asks for.

        Raises:
            ValueError: naming the field that is wrong.
        """
        sampler, seq = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is None:
            facts: dict[str, Any] = {
                "base_model": body.get("base_model"),
                "model_path": body.get("model_path"),
            }
            if facts["model_path"] is not None:
                source, _ = self.source(str(facts["model_path"]), "model_path")
                facts["base_model"] = source.facts["base_model"]
            self.base(str(facts["base_model"]))
            sampler, seq = str(facts["model_path"] or facts["base_model"]), uuid.uuid4().hex
            with self._changed:
                self.samplers.setdefault(sampler, facts)
        else:
            facts = self.sampler(str(sampler))
            if type(seq) is not int:
                raise ValueError(f"seq_id must be a whole number, got {seq!r:.80}")
        base, request_id = self.base(facts["base_model"]), f"{sampler}:{seq}"
        key = str(sampler), str(seq)
        parsed = sample_request(body, base, key)
        with self._changed:
            if request_id not in self._futures:
                self._check_room()
                job = Job(request_id, "sample", b"", sample=parsed, sample_body=(body, key))
                self._futures[request_id] = job.future
                if sampler not in self._queues:
                    self._queues[sampler] = []
                    self._turns.append(sampler)
                self._queues[sampler].append(job)
                self._changed.notify_all()
        return request_id, parsed.num_samples

    def future(self, request_id: str) -> "Future[Result]":
        """What a request gives, or will.

        Raises:
            NotFoundError: if nothing is known of it.
        """
        with self._changed:
            if request_id in self._futures:
                return self._futures[request_id]
        run, _, seq = request_id.rpartition(":")
        if run in self.runs and seq.isdigit():
            kept = self.runs[run].store.result(int(seq))
            if kept is not None:
                kind, body = kept
                media_type = PROTOBUF if kind == "pb" else JSON
                found: Future[Result] = Future()
                found.set_result(Result(body, media_type, "user" if kind == "error" else None))
                return found
        raise NotFoundError(f"nothing is known of the request {request_id!r:.120}")

    def cancel(self, request_id: str) -> None:
        """Give up a request for samples that has not begun."""
        with self._changed:
            for queue in self._queues.values():
                for job in [each for each in queue if each.request_id == request_id]:
                    queue.remove(job)
                    job.future.set_result(Result.failure("the request was cancelled", "user"))

    # The thread that computes

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to work."""

        def run() -> None:
            try:
                self.work()
            except BaseException as error:  # noqa: BLE001 - told by who waits
                self.failure = f"{type(error).__name__}: {error}"
                on_failure()

        self._thread = threading.Thread(target=run, name="tinker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after what is being computed; what waits is kept on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def work(self) -> None:
        """Work off requests, of runs and samplers in turns, until the service is closed."""
        while True:
            with self._changed:
                while not self._closed and (turn := self._next()) is None:
                    self._changed.wait(1.0)  # numbers are lost by the clock
                if self._closed:
                    return
                assert turn is not None
                self._turns.remove(turn)
                self._turns.append(turn)
                run = self.runs.get(turn)
                jobs = [] if run is not None else self._batch(turn)
                runs = [] if run is None else self._beside(run)
            if run is None:
                self._sample(turn, jobs)
            elif len(runs) > 1:
                self._work_together(runs)
            else:
                self._work_on(run)

    def _next(self) -> str | None:
        for turn in self._turns:
            if turn in self.runs:
                if self._is_ready(self.runs[turn]):
                    return turn
            elif self._queues[turn]:
                return turn
        return None

    def _is_ready(self, run: TrainingRun) -> bool:
        """Whether a request can be worked off; what does not come in time is left out."""
        if not run.waiting or run.done + 1 in run.waiting:
            return bool(run.waiting)
        parts = all(job.kind == "forward_backward" for job in run.waiting.values())
        if time.monotonic() - run.arrived < (LOST_PART_SECONDS if parts else LOST_SECONDS):
            return False
        run.done = min(run.waiting) - 1
        return True

    def _beside(self, run: TrainingRun) -> list[TrainingRun]:
        """Runs of one base whose next request is a forward pass, this one first."""
        if run.waiting[run.done + 1].kind != "forward_backward":
            return [run]
        found = [run]
        for each in self.runs.values():
            job = each.waiting.get(each.done + 1)
            fits = job is not None and job.kind == "forward_backward" and each.base is run.base
            if fits and each is not run and len(found) < self._max_adapters:
                found.append(each)
        return found

    def _work_together(self, runs: Sequence[TrainingRun]) -> None:
        """The next requests of several runs, which are ``forward_backward``."""
        try:
            results = self._forward(runs)
        except Exception as error:  # noqa: BLE001 - each is worked off by itself then
            note(f"{len(runs)} runs take turns: {type(error).__name__}: {error}")
            for run in runs:
                self.worker.close(run.run)  # its gradients may be of a part of the examples
                self._work_on(run)
            return
        for run, result in zip(runs, results, strict=True):
            self._finish(run, result)

    def _work_on(self, run: TrainingRun) -> None:
        """The next request of a run."""
        seq = run.done + 1
        job = run.waiting[seq]
        try:
            result = self._answer(run, seq, job)
        except Exception as error:  # noqa: BLE001 - others go on
            result = _failed(job.kind, error, "send fewer or shorter examples", "tokens_per_device")
        self._finish(run, result)

    def _finish(self, run: TrainingRun, result: Result) -> None:
        """Tell what the next request of a run has given."""
        seq = run.done + 1
        job = run.waiting[seq]
        if result.error == "server":
            self.worker.close(run.run)  # it may have changed in part: what is on disk counts
        kind = "error" if result.error else "pb" if result.media_type == PROTOBUF else "json"
        try:
            run.store.write_result(seq, kind, result.body)
            is_kept = True
        except OSError as error:  # it is answered from memory
            note(f"error: a result of {run.run} could not be kept: {error}")
            is_kept = False
        with self._changed:
            del run.waiting[seq]
            run.done = seq
            if is_kept:  # whoever asks again gets it from the disk
                del self._futures[job.request_id]
        job.future.set_result(result)

    def _answer(self, run: TrainingRun, seq: int, job: Job) -> Result:
        if job.kind == "forward_backward":
            return self._forward([run])[0]
        if run.saved < 0 and (made := run.store.result(0)) is not None and made[0] == "error":
            raise ValueError("the model could not be made; make another one")
        body = content_of(job.body)
        if job.kind == "create_model":
            return self._create(run, seq, body)
        if job.kind == "optim_step":
            return self._step(run, seq, body)
        if job.kind == "load_weights":
            return self._load(run, seq, body)
        if job.kind == "save_weights":
            return self._save(run, job.kind, "weights", body)
        if job.kind == "save_weights_external":
            if body.get("age_encryption_recipients"):
                raise ValueError("age_encryption_recipients is not built here")
            return self._save(run, job.kind, "external_weights", body)
        return self._save_for_sampler(run, seq, body)

    def _adapter(self, run: TrainingRun) -> TrainedAdapter:
        """A run's adapter, in memory; another one makes room where it must."""
        adapters = self.worker.adapters
        if run.run not in adapters:
            while len(adapters) >= self._max_adapters:
                self.worker.close(next(iter(adapters)))
            self.worker.open(run.run, run.done)
        adapters.move_to_end(run.run)
        return adapters[run.run]

    def _write_state(
        self, run: TrainingRun, adapter: TrainedAdapter, seq: int, result: Result
    ) -> None:
        facts = {"seq": seq, "steps": adapter.steps}
        run.store.write_result(seq, "json", result.body)  # else it would be lost with the log
        run.store.write_state({**adapter.values(), **self.worker.moments(run.run)}, facts)
        run.saved = seq

    def _create(self, run: TrainingRun, seq: int, body: Mapping[str, Any]) -> Result:
        adapter, path = self._adapter(run), body.get("path")
        if path is not None:
            self.source(path)
            self.worker.load(run.run, path, bool(body.get("optimizer")))
        kind = "create_model" if path is None else "load_weights"
        result = Result.of({"type": kind, "path": path, "model_id": run.run})
        self._write_state(run, adapter, seq, result)
        return result

    def source(self, path: str, name: str = "path") -> tuple[TrainingRun, Path]:
        """The run whose weights are at a ``tinker://`` path, and their directory."""
        weights = parse_path(path)
        if weights.run not in self.runs:
            raise NotFoundError(f"{name}: there is no model {weights.run!r:.120}")
        run = self.runs[weights.run]
        place = run.store.place(weights)
        if kept_facts(place) is None:
            raise ValueError(
                f"{name}: there are no weights {path:.120}; they were deleted or never saved, or "
                "their time is over"
            )
        return run, place

    def _forward(self, runs: Sequence[TrainingRun]) -> list[Result]:
        """What the next requests of different runs of one base give."""
        for run in runs:
            self._adapter(run)
        found = self.worker.forward([(run.run, run.done + 1) for run in runs])
        return [
            Result.failure(each, "user")
            if isinstance(each, ValueError)
            else Result(forward_backward_output(*each), PROTOBUF)
            for each in found
        ]

    def _step(self, run: TrainingRun, seq: int, body: Mapping[str, Any]) -> Result:
        params = adam_params(body)
        adapter = self._adapter(run)
        loss = sum(adapter.losses)
        metrics = self.worker.step(run.run, vars(params))
        result = Result.of({"metrics": metrics})
        if adapter.steps % self._state_every == 0:
            self._write_state(run, adapter, seq, result)
        line = {
            "step": adapter.steps,
            "loss": loss,
            "learning_rate": params.learning_rate,
            "grad_norm": metrics["grad_norm"],
        }
        with suppress(OSError):  # the step itself is on disk
            run.store.append_metrics(line)
        return result

    def _load(self, run: TrainingRun, seq: int, body: Mapping[str, Any]) -> Result:
        fields = JsonFields(body)
        path = fields.take("path", str)
        optimizer = fields.take("optimizer", bool)
        if (other := self.source(path)[0].base) is not run.base:
            raise ValueError(
                f"path: the weights are of {other.name}, and the model is of {run.base.name}"
            )
        adapter = self._adapter(run)
        self.worker.load(run.run, path, optimizer)
        result = Result.of({"type": "load_weights", "path": path, "model_id": run.run})
        self._write_state(run, adapter, seq, result)
        return result

    def _save(self, run: TrainingRun, request: str, kind: str, body: Mapping[str, Any]) -> Result:
        fields = JsonFields(body)
        weights = run.store.weights(kind, fields.take("path", str, None))
        place = run.store.place(weights)
        if not fields.take("overwrite", bool, kind != "weights"):
            facts = kept_facts(place)
            if facts is not None and facts.get("steps") != self._adapter(run).steps:
                raise ValueError(
                    f"path: {weights.path} is there already; overwrite=True replaces it"
                )
        self._write(run, weights, body)
        return Result.of({"type": request, "path": weights.path})

    def _write(self, run: TrainingRun, weights: Weights, body: Mapping[str, Any]) -> None:
        fields = JsonFields(body)
        facts = {
            "time": now(),
            "expires_at": end_of_time(fields.take("ttl_seconds", int, None)),
            "user_metadata": fields.texts("user_metadata"),
        }
        place = run.store.place(weights)
        adapter = self._adapter(run)
        moments = self.worker.moments(run.run) if weights.kind == "weights" else {}
        adapter.write(place, moments, facts)
        self.worker.drop_sampler(weights.path)

    def _save_for_sampler(self, run: TrainingRun, seq: int, body: Mapping[str, Any]) -> Result:
        if body.get("path") is not None:
            return self._save(run, "save_weights_for_sampler", "sampler_weights", body)
        number = body.get("sampling_session_seq_id")
        if type(number) is not int:
            raise ValueError("save_weights_for_sampler needs path or sampling_session_seq_id")
        weights = Weights(run.run, "sampler_weights", f"{UNNAMED}{seq}")
        self._write(run, weights, body)
        gone = run.store.drop_unnamed()
        with self._changed:
            for name in [k for k, v in self.samplers.items() if v["model_path"] in gone]:
                del self.samplers[name]
        sampler = f"{run.facts['session']}:sample:{number}"
        facts = {"base_model": run.base.name, "model_path": weights.path}
        self._put_sampler(sampler, facts)
        return Result.of({"type": "save_weights_for_sampler", "sampling_session_id": sampler})

    # Sampling

    def _batch(self, sampler: str) -> list[Job]:
        """The first request that waits, and those that are decoded with it."""
        queue = self._queues[sampler]
        first = _alike(queue[0])
        chosen: list[Job] = []
        count = 0
        for job in [each for each in queue if _alike(each) == first]:
            assert job.sample is not None
            if chosen and count + job.sample.num_samples > self._max_batch_size:
                break
            chosen.append(job)
            count += job.sample.num_samples
        for job in chosen:
            queue.remove(job)
        return chosen

    def _sample(self, sampler: str, jobs: Sequence[Job]) -> None:
        try:
            facts = self.sampler(sampler)
            base, path = self.base(facts["base_model"]).name, facts["model_path"]
            if path is not None and path not in self.worker.samplers:
                self.source(path)
            bodies = [job.sample_body for job in jobs if job.sample_body is not None]
            found = self.worker.sample(base, path, bodies, self._max_adapters)
            results = [Result(each, PROTOBUF) for each in found]
        except Exception as error:  # noqa: BLE001 - others go on
            result = _failed("sampling", error, "ask for fewer answers at once", "max_batch_size")
            results = [result] * len(jobs)
        with self._changed:
            for job, result in zip(jobs, results, strict=True):
                job.future.set_result(result)
                self._samples[job.request_id] = len(result.body)
                self._sample_bytes += len(result.body)
            while self._sample_bytes > KEPT_BYTES and len(self._samples) > 1:
                oldest, size = self._samples.popitem(last=False)
                self._sample_bytes -= size
                del self._futures[oldest]


def _failed(what: str, error: Exception, advice: str, option: str) -> Result:
    """The result of a request that ended in an error; what is beside the advice is an option."""
    if isinstance(error, ValueError | NotFoundError):
        return Result.failure(error, "user")
    if FULL in str(error):
        torch.cuda.empty_cache()
        words = f"out of GPU memory: {advice}, or start the service with a smaller --{option}"
        return Result.failure(words, "server")
    note(f"error: {what} failed: {type(error).__name__}: {error}")
    return Result.failure(f"{what} failed: {type(error).__name__}", "server")


def end_of_time(seconds: int | None) -> str | None:
    """When weights go that stay so long; None: never.

    Raises:
        ValueError: if it is no such time.
    """
    if seconds is None:
        return None
    if not 1 <= seconds <= MOST_NUMBER:
        raise ValueError(f"ttl_seconds must be from 1 to {MOST_NUMBER}")
    ends = datetime.now(UTC) + timedelta(seconds=seconds)
    return ends.isoformat(timespec="milliseconds")


def _alike(job: Job) -> object:
    """Equal for requests that one batch decodes."""
    assert job.sample is not None
    return replace(job.sample.options, max_tokens=1, seed=())


def kept_facts(place: Path) -> dict[str, Any] | None:
    """What is known of saved weights; None where there are none, or their time is over."""
    if not (place / CHECKPOINT_FILE).is_file():
        return None
    found: dict[str, Any] = json.loads((place / CHECKPOINT_FILE).read_text("utf-8"))
    ends = found.get("expires_at")
    return found if ends is None or ends > now() else None
