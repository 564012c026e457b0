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
from dataclasses import replace
from types import MappingProxyType

from dschat_lora.addons.serving.endpoint.errors import BusyError
from dschat_lora.addons.tinker.adapters import TrainedAdapter
from dschat_lora.addons.tinker.formats import (
    PROTOBUF,
    JsonFields,
    adam_params,
    content_of,
    forward_backward_output,
    sample_request,
)
from dschat_lora.addons.tinker.registry import Registry, TrainingRun, known
from dschat_lora.addons.tinker.requests import Job, NotFoundError, Result, SampleJob, failed
from dschat_lora.addons.tinker.store import (
    MOST_NUMBER,
    UNNAMED,
    Facts,
    RunStore,
    Weights,
    end_of_time,
    kept_facts,
    now,
)
from dschat_lora.addons.tinker.worker import Worker
from dschat_lora.engine.distributed import world_size
from dschat_lora.report.terminal import note

KEPT_BYTES = 2**28  # of samples that may be asked for once more
# Seconds after which a number that has not come is taken as lost: clients send the parts of one
# forward_backward side by side, and anything else once all before it was answered or given up.
LOST_PART_SECONDS, LOST_SECONDS = 60.0, 2.0
# What requests save.
SAVED = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}


class TinkerService:
    """What answers requests; its methods but :meth:`work` may be called from any thread.

    Args:
        worker: of this process, with the bases and the directory of all runs.
        max_adapters: most adapters in memory, those in training and those of samplers each.
        max_queue: most requests that wait.
        max_batch_size: most answers that are decoded at a time.
        state_every: steps of a run after which its state is written; what was sent since is then
            computed again where it is needed.
        aliases: other names of bases.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        max_adapters: int = 16,
        max_queue: int = 4096,
        max_batch_size: int = 64,
        state_every: int = 1,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.worker, self.store = worker, worker.store
        self.registry = Registry(worker.bases, worker.store, aliases)
        self._state_every = state_every
        self._max_adapters, self._max_queue = max_adapters, max_queue
        self._max_batch_size = max_batch_size * world_size()
        self.runs = self.registry.runs
        self._futures: dict[str, Future[Result]] = {}
        self._samples: OrderedDict[str, int] = OrderedDict()  # bytes of those that are done
        self._sample_bytes = 0  # of all of them
        self._queues: dict[str, list[SampleJob]] = {}  # of samplers
        self._turns: list[str] = []  # runs and samplers, the one whose turn is next first
        self._changed = threading.Condition(self.registry.changing)
        self._closed = False
        self.failure: str | None = None
        self._thread: threading.Thread | None = None
        for each in self.store.runs():
            self._open(each)

    def _open(self, store: RunStore) -> None:
        """A run that was here before, with the requests that it had accepted."""
        facts = store.facts()
        if facts["base_model"] not in self.worker.bases:
            note(f"{store.run} is left out: its base {facts['base_model']} is not served")
            return
        run = TrainingRun(store.run, self.worker.bases[facts["base_model"]], store, facts)
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

    # Requests

    def create_run(self, session: str, number: int, body: Facts) -> str:
        """Accept ``create_model``, or ``load_weights`` that makes a model; the request's id.

        Raises:
            ValueError: if it cannot be made.
        """
        known(self.registry.sessions, "there is no session", session)
        if not 0 <= number <= MOST_NUMBER:
            raise ValueError(f"model_seq_id must be from 0 to {MOST_NUMBER}")
        run = f"{session}:train:{number}"
        if run not in self.runs:  # else asked for once more
            facts, base = self.registry.run_facts(body)
            facts |= {"model_id": run, "session": session, "created": now(), "last_request": now()}
            store = self.store.run(run)
            with self._changed:
                if run not in self.runs:  # where the same request came twice at once
                    store.create(facts)
                    self.runs[run] = TrainingRun(run, base, store, facts)
                    self._turns.append(run)
        return self.submit(run, 0, "create_model", json.dumps(body).encode())

    def submit(self, run: str, seq: int | None, kind: str, body: bytes) -> str:
        """Accept a request of a run; its id. One that comes once more is the same request.

        Raises:
            NotFoundError: if there is no such run.
            ValueError: without a number.
            BusyError: if too many wait.
        """
        owner = known(self.runs, "there is no model", run, 120)
        if seq is None or (seq < 1 and kind != "create_model"):
            raise ValueError(f"seq_id must be a whole number from 1 on, got {seq}")
        if seq > MOST_NUMBER:
            raise ValueError(f"seq_id must be at most {MOST_NUMBER}")
        with self._changed:
            if seq > owner.done and seq not in owner.waiting:
                if seq != owner.done + 1:  # for which others may wait
                    self._check_room()
                owner.store.log(seq, kind, body)
                self._enqueue(owner, seq, kind, body)
                owner.arrived, owner.facts["last_request"] = time.monotonic(), now()
                self._changed.notify_all()
        return f"{run}:{seq}"

    def _enqueue(self, run: TrainingRun, seq: int, kind: str, body: bytes) -> None:
        job = run.waiting[seq] = Job(f"{run.run}:{seq}", kind, body)
        self._futures[job.request_id] = job.future

    def _check_room(self) -> None:
        if self._closed:
            raise BusyError("the service is ending")
        waiting = sum(len(run.waiting) for run in self.runs.values())
        if waiting + sum(map(len, self._queues.values())) >= self._max_queue:
            raise BusyError(f"{self._max_queue} requests wait already; ask again later")

    def sample(self, body: Facts) -> tuple[str, int]:
        """Accept ``asample``; the request's id, and how many answers it asks for.

        Raises:
            ValueError: naming the field that is wrong.
        """
        sampler, seq = body.get("sampling_session_id"), body.get("seq_id")
        if sampler is None:
            path, asked = body.get("model_path"), str(body.get("base_model"))
            facts = self.registry.sampler_facts(asked, None if path is None else str(path))
            sampler, seq = str(path or asked), uuid.uuid4().hex
            with self._changed:
                self.registry.samplers.setdefault(sampler, facts)
        else:
            facts = known(self.registry.samplers, "there is no sampler", str(sampler))
            if type(seq) is not int:
                raise ValueError(f"seq_id must be a whole number, got {seq!r:.80}")
        key, request_id = (str(sampler), str(seq)), f"{sampler}:{seq}"
        parsed = sample_request(body, self.registry.base(facts["base_model"]), key)
        with self._changed:
            if request_id not in self._futures:
                self._check_room()
                job = SampleJob(request_id, parsed, (body, key))
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
        kept = self.runs[run].store.result(int(seq)) if run in self.runs and seq.isdigit() else None
        if kept is None:
            raise NotFoundError(f"nothing is known of the request {request_id!r:.120}")
        future: Future[Result] = Future()
        future.set_result(Result.kept(*kept))
        return future

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
                while (
                    not self._closed
                    and (turn := next(filter(self._is_ready, self._turns), None)) is None
                ):
                    self._changed.wait(1.0)  # numbers are lost by the clock
                if self._closed:
                    return
                assert turn is not None
                self._turns.remove(turn)
                self._turns.append(turn)
                runs = self._beside(self.runs[turn]) if turn in self.runs else []
                jobs = [] if runs else self._batch(self._queues[turn])
            if runs:
                self._work_on(runs)
            else:
                self._sample(turn, jobs)

    def _is_ready(self, turn: str) -> bool:
        """Whether a request can be worked off; what does not come in time is left out."""
        if (run := self.runs.get(turn)) is None:
            return bool(self._queues[turn])
        if not run.waiting or run.following:
            return bool(run.waiting)
        parts = all(job.kind == "forward_backward" for job in run.waiting.values())
        if time.monotonic() - run.arrived < (LOST_PART_SECONDS if parts else LOST_SECONDS):
            return False
        run.done = min(run.waiting) - 1
        return True

    def _beside(self, run: TrainingRun) -> list[TrainingRun]:
        """This run, and others of its base whose next request is a forward pass, as its own is."""
        alike = [
            each
            for each in (run, *(each for each in self.runs.values() if each is not run))
            if each.base is run.base
            and (job := each.following) is not None
            and job.kind == "forward_backward"
        ]
        return alike[: self._max_adapters] if run in alike else [run]

    def _work_on(self, runs: Sequence[TrainingRun]) -> None:
        """The next requests of runs: of several, their forward passes at once."""
        try:
            results = self._forward(runs) if len(runs) > 1 else [self._answer(runs[0])]
        except Exception as error:  # noqa: BLE001 - others go on
            if len(runs) > 1:  # each is worked off by itself then
                note(f"{len(runs)} runs take turns: {type(error).__name__}: {error}")
                for run in runs:
                    self.worker.close(run.run)  # its gradients may be of a part of the examples
                    self._work_on([run])
                return
            kind = runs[0].waiting[runs[0].done + 1].kind
            advice = "send fewer or shorter examples"
            results = [failed(kind, error, advice, "tokens_per_device")]
        for run, result in zip(runs, results, strict=True):
            self._finish(run, result)

    def _finish(self, run: TrainingRun, result: Result) -> None:
        """Tell what the next request of a run has given."""
        seq = run.done + 1
        job = run.waiting[seq]
        if result.error == "server":
            self.worker.close(run.run)  # it may have changed in part: what is on disk counts
        try:
            run.store.write_result(seq, result.kind, result.body)
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

    def _answer(self, run: TrainingRun) -> Result:
        """What the next request of a run gives."""
        seq = run.done + 1
        job = run.waiting[seq]
        if job.kind == "forward_backward":
            return self._forward([run])[0]
        if run.saved < 0 and (made := run.store.result(0)) is not None and made[0] == "error":
            raise ValueError("the model could not be made; make another one")
        fields = content_of(job.body)
        if job.kind == "optim_step":
            return self._step(run, seq, fields)
        if job.kind in SAVED:
            return self._save(run, seq, job.kind, fields)
        return self._load(run, seq, fields, is_new=job.kind == "create_model")

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

    def _forward(self, runs: Sequence[TrainingRun]) -> list[Result]:
        """What the next requests of different runs of one base give."""
        for run in runs:
            self._adapter(run)
        outputs = self.worker.forward([(run.run, run.done + 1) for run in runs])
        return [
            Result.failure(each, "user")
            if isinstance(each, ValueError)
            else Result(forward_backward_output(*each), PROTOBUF)
            for each in outputs
        ]

    def _step(self, run: TrainingRun, seq: int, fields: JsonFields) -> Result:
        params = adam_params(fields)
        adapter = self._adapter(run)
        loss = sum(adapter.losses)
        metrics = self.worker.step(run.run, vars(params))
        result = Result.of({"metrics": metrics})
        if adapter.steps % self._state_every == 0:
            self._write_state(run, adapter, seq, result)
        line = {"step": adapter.steps, "loss": loss, "learning_rate": params.learning_rate}
        with suppress(OSError):  # the step itself is on disk
            run.store.append_metrics({**line, "grad_norm": metrics["grad_norm"]})
        return result

    def _load(self, run: TrainingRun, seq: int, fields: JsonFields, *, is_new: bool) -> Result:
        """A new adapter, or one that has saved weights from here on."""
        path = fields.take("path", str, None if is_new else ...)
        optimizer = fields.take("optimizer", bool, False if is_new else ...)
        if path is not None and (other := self.registry.source(path)[0].base) is not run.base:
            raise ValueError(
                f"path: the weights are of {other.name}, and the model is of {run.base.name}"
            )
        adapter = self._adapter(run)
        if path is not None:
            self.worker.load(run.run, path, optimizer)
        kind = "create_model" if path is None else "load_weights"
        result = Result.of({"type": kind, "path": path, "model_id": run.run})
        self._write_state(run, adapter, seq, result)
        return result

    def _save(self, run: TrainingRun, seq: int, request: str, fields: JsonFields) -> Result:
        path = fields.take("path", str, None)
        if request == "save_weights_for_sampler" and path is None:
            return self._save_unnamed(run, seq, fields)
        if fields.take("age_encryption_recipients", object, None):
            raise ValueError("age_encryption_recipients is not built here")
        weights = run.store.weights(SAVED[request], path)
        if not fields.take("overwrite", bool, request != "save_weights"):
            facts = kept_facts(run.store.place(weights))
            if facts is not None and facts.get("steps") != self._adapter(run).steps:
                raise ValueError(
                    f"path: {weights.path} is there already; overwrite=True replaces it"
                )
        self._write(run, weights, fields)
        return Result.of({"type": request, "path": weights.path})

    def _write(self, run: TrainingRun, weights: Weights, fields: JsonFields) -> None:
        facts = {
            "time": now(),
            "expires_at": end_of_time(fields.take("ttl_seconds", int, None)),
            "user_metadata": fields.texts("user_metadata"),
        }
        adapter = self._adapter(run)
        moments = self.worker.moments(run.run) if weights.kind == "weights" else {}
        adapter.write(run.store.place(weights), moments, facts)
        self.worker.drop_sampler(weights.path)

    def _save_unnamed(self, run: TrainingRun, seq: int, fields: JsonFields) -> Result:
        """Weights that a new sampler alone has."""
        number = fields.rest.get("sampling_session_seq_id")
        if type(number) is not int:
            raise ValueError("save_weights_for_sampler needs path or sampling_session_seq_id")
        weights = Weights(run.run, "sampler_weights", f"{UNNAMED}{seq}")
        self._write(run, weights, fields)
        gone = run.store.drop_unnamed()
        with self._changed:
            for name in [k for k, v in self.registry.samplers.items() if v["model_path"] in gone]:
                del self.registry.samplers[name]
        sampler = f"{run.facts['session']}:sample:{number}"
        self.registry.put(
            "samplers", sampler, {"base_model": run.base.name, "model_path": weights.path}
        )
        return Result.of({"type": "save_weights_for_sampler", "sampling_session_id": sampler})

    # Sampling

    def _batch(self, queue: list[SampleJob]) -> list[SampleJob]:
        """The first request that waits, and those that are decoded with it."""

        def alike(job: SampleJob) -> object:
            return replace(job.sample.options, max_tokens=1, seed=())

        chosen: list[SampleJob] = []
        count = 0
        for job in [each for each in queue if alike(each) == alike(queue[0])]:
            count += job.sample.num_samples
            if chosen and count > self._max_batch_size:
                break
            chosen.append(job)
            queue.remove(job)
        return chosen

    def _sample(self, sampler: str, jobs: Sequence[SampleJob]) -> None:
        try:
            facts = known(self.registry.samplers, "there is no sampler", sampler)
            base, path = self.registry.base(facts["base_model"]).name, facts["model_path"]
            if path is not None and path not in self.worker.samplers:
                self.registry.source(path)
            answers = self.worker.sample(base, path, [job.body for job in jobs], self._max_adapters)
            results = [Result(each, PROTOBUF) for each in answers]
        except Exception as error:  # noqa: BLE001 - others go on
            result = failed("sampling", error, "ask for fewer answers at once", "max_batch_size")
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
