"""What is here by its name: bases, sessions, samplers, and runs that train."""

import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dschat_lora.addons.tinker.bases import Adapting, Base
from dschat_lora.addons.tinker.formats import JsonFields, adapting
from dschat_lora.addons.tinker.requests import Job, NotFoundError
from dschat_lora.addons.tinker.store import Facts, RunStore, Store, kept_facts, now, parse_path

ValueT = TypeVar("ValueT")


def known(values: Mapping[str, ValueT], what: str, name: str, shown: int = 80) -> ValueT:
    """The value of a name; ``what`` is said where there is none, and the name's beginning.

    Raises:
        NotFoundError: if there is none.
    """
    if name not in values:
        raise NotFoundError(f"{what} {name!r:.{shown}}")
    return values[name]


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
    facts: Facts
    done: int = -1
    saved: int = -1
    waiting: dict[int, Job] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)

    @property
    def how(self) -> Adapting:
        """Which layers train."""
        return Adapting(**self.facts["lora"])

    @property
    def following(self) -> Job | None:
        """The request that is to be worked off next, if it has come."""
        return self.waiting.get(self.done + 1)


class Registry:
    """Bases, and what is kept of sessions, samplers and runs.

    Args:
        bases: by the names that requests know them by.
        store: where all is kept.
        aliases: other names of bases.
    """

    def __init__(self, bases: Mapping[str, Base], store: Store, aliases: Mapping[str, str]) -> None:
        self.bases, self.store, self._aliases = bases, store, aliases
        self.sessions, self.samplers = map(store.table, ("sessions", "samplers"))
        self.runs: dict[str, TrainingRun] = {}
        self.changing = threading.RLock()  # held by whoever changes one of them

    def create_session(self, facts: Facts) -> str:
        """A new session."""
        session = str(uuid.uuid4())
        self.put("sessions", session, {**facts, "created_at": now()})
        return session

    def put(self, name: str, key: str, facts: Facts) -> None:
        """Keep facts of one of the ``sessions`` or ``samplers``, and write them all."""
        table: dict[str, Facts] = getattr(self, name)
        with self.changing:
            table[key] = facts
            self.store.write_table(name, table)

    def finish_session(self, session: str, reason: object) -> None:
        """Note how a session ended; the first reason stays."""
        with self.changing:
            facts = known(self.sessions, "there is no session", session)
            self.put("sessions", session, {"finished": reason, **facts})

    def create_sampler(
        self, session: str, number: int, *, base: str | None, path: str | None
    ) -> str:
        """The sampler of a base, or of saved weights.

        Raises:
            ValueError: if neither is named, or what is named is not here.
        """
        known(self.sessions, "there is no session", session)
        sampler = f"{session}:sample:{number}"
        self.put("samplers", sampler, self.sampler_facts(base, path))
        return sampler

    def sampler_facts(self, base: str | None, path: str | None) -> Facts:
        """Those of the sampler of a base, or of saved weights."""
        if path is not None:
            base = self.source(path, "model_path")[0].facts["base_model"]
        if base is None:
            raise ValueError("a sampler needs base_model or model_path")
        return {"base_model": self.base(base).name, "model_path": path}

    def join_sampler(self, sampler: str) -> int:
        """A number for one more client of a sampler."""
        with self.changing:
            facts = known(self.samplers, "there is no sampler", sampler)
            count = int(facts.get("clients", 0)) + 1
            self.put("samplers", sampler, {**facts, "clients": count})
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

    def run_facts(self, body: Facts) -> tuple[Facts, Base]:
        """What a body asks for in a new run, and the base."""
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
        metadata = fields.texts("user_metadata")
        return {"base_model": base.name, "lora": vars(how), "user_metadata": metadata}, base

    def source(self, path: str, name: str = "path") -> tuple[TrainingRun, Path]:
        """The run whose weights are at a ``tinker://`` path, and their directory."""
        weights = parse_path(path)
        run = known(self.runs, f"{name}: there is no model", weights.run, 120)
        place = run.store.place(weights)
        if kept_facts(place) is None:
            raise ValueError(
                f"{name}: there are no weights {path:.120}; they were deleted or never saved, or "
                "their time is over"
            )
        return run, place
