"""The engines of a run, and each role's outputs for a batch of responses."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import StepOutcome, TrainEngine
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.models.architecture_checks import check_architecture
from dschat_lora.models.causal_lm import Policy
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.rl.draw.engine import Drawing
from dschat_lora.rl.learn.experience import Experience, padded
from dschat_lora.rl.learn.reference import ActorAsItWas, LossHead, Reference
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.batch import ResponseBatch, gather_rows, response_mask
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import REWARD_MODEL, RewardSum, Scorer, Scores
from dschat_lora.rl.score.user_functions import TrainerState
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import resolve_logits

ResultT = TypeVar("ResultT")


class Network(nn.Module):
    """The roles of one engine; each call names the role to run."""

    roles: Mapping[str, Policy | RewardModel]
    head: LossHead | None

    def __init__(self, *, head: LossHead | None = None, **roles: Policy | RewardModel) -> None:
        """Hold the roles, and the head that the reference gives, if any."""
        super().__init__()
        self.roles = nn.ModuleDict(roles)  # type: ignore[assignment]
        self.head = head

    def policy(self, role: str) -> Policy:
        """The actor or the reference."""
        policy = self.roles[role]
        assert isinstance(policy, Policy)
        return policy

    def forward(self, role: str, *args: Any) -> object:
        """What the role returns, or the head where there is none."""
        if not role and self.head is not None:
            return self.head.outputs(self, *args)
        return self.roles[role](*args)


class Retry:
    """Computes again what ran out of GPU memory, once: bit for bit what the first attempt would.

    That takes memory to free, which decoding keeps between rollouts. Forward passes leave nothing
    behind, as no role has dropout; backward passes leave gradients, which can be dropped at ZeRO 0
    alone. What other processes took part in is not repeated: they would not do so again.

    Args:
        engines: all that compute. drawing: of responses; None: nothing is tried again.
    """

    def __init__(
        self, engines: Collection[TrainEngine[nn.Module]] = (), drawing: Drawing | None = None
    ) -> None:
        self._engines, self._drawing = engines, drawing
        self._in_collective = False

    def __call__(self, compute: Callable[[], ResultT], *, backward: bool = False) -> ResultT:
        """What forward passes give or, with ``backward``, all passes of an optimizer step."""
        drawing, repeats = self._drawing, "repeats_backward" if backward else "repeats_forward"
        try:
            return compute()
        except torch.OutOfMemoryError:
            can_repeat = all(getattr(each, repeats) for each in self._engines)
            if drawing is None or not drawing.keeps or self._in_collective or not can_repeat:
                raise
        # The error is gone, and with it the frames that held what the first attempt had made.
        drawing.release()
        for engine in self._engines if backward else ():
            engine.forget_gradients()
        return compute()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Within, all processes take part: what fails there is not tried again."""
        self._in_collective = True
        yield
        self._in_collective = False


@dataclass(frozen=True)
class Engines:
    """Actor and critic. Call methods on every rank, in one order: weights may be sharded."""

    actor: TrainEngine[Network]  # with the reference, and the reward model if there is no critic
    critic: TrainEngine[Network] | None  # with the reward; None where responses are compared
    reward: TrainEngine[Network] | None  # which of the two has the reward model, if there is one
    temperature: float  # of all log-probabilities
    reference: Reference = field(default_factory=ActorAsItWas)
    shares_prompts: bool = False  # whether responses to one prompt may be branches of one row
    retry: Retry = field(default_factory=Retry)  # of passes that run out of memory

    @cached_property
    def trained(self) -> Mapping[str, TrainEngine[Network]]:
        """Actor and critic by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @cached_property
    def casts(self) -> FactorCasts:
        """Factors of adapters as optimizer steps compute with them."""
        return FactorCasts(*(engine.module for engine in self.trained.values()))

    def eval(self) -> None:
        """Evaluation mode."""
        self.train(())

    def train(self, roles: Collection[str]) -> None:
        """Training mode of ``roles``, which allows recomputation; evaluation mode of the others."""
        for name, engine in self.trained.items():
            (engine.train if name in roles else engine.eval)()

    def set_rates(self, factor: float) -> dict[str, dict[str, float]]:
        """Set the learning rates of both; returns them by role and parameter group."""
        return {name: engine.set_rates(factor) for name, engine in self.trained.items()}

    def queue_step(self, roles: Collection[str]) -> Callable[[], dict[str, StepOutcome]]:
        """One optimizer step of ``roles``, from the gradients so far; gives what waits for it.

        Where an fp16 loss is scaled the host waits here, as the next step needs to know.
        """
        trained = {name: each for name, each in self.trained.items() if name in roles}
        queued = {name: engine.queue_step() for name, engine in trained.items()}
        for name, engine in trained.items():
            if engine.loss_scaler is not None:
                queued[name]()
        return lambda: {name: outcome() for name, outcome in queued.items()}

    def policy(
        self, batch: ResponseBatch, width: int, role: str = "actor"
    ) -> tuple[Tensor, Tensor]:
        """(n, width) log-probabilities and entropies of response tokens by a policy, in nats."""
        if role == "reference":
            batch = batch.reference or batch
        inputs = *batch.inputs, batch.logit_positions, batch.target_ids
        logprobs, entropies = self.retry(
            lambda: self.actor(role, *inputs, self.temperature, batch.spans)
        )
        return batch.table(logprobs, width), batch.table(entropies, width)

    def outputs(self, batch: ResponseBatch, width: int) -> tuple[Tensor, ...]:
        """What :meth:`policy` gives of the actor and, where there is a head, (n, width) losses.

        The losses alone have a gradient then, and entropies where there is a bonus for them.
        """
        if self.actor.module.head is None:
            return self.policy(batch, width)
        logprobs, *others = self.retry(
            lambda: self.actor("", batch, batch.reference or batch, self.temperature)
        )
        return tuple(batch.table(each, width) for each in (logprobs.detach(), *others))

    def values(self, batch: ResponseBatch, width: int) -> Tensor:
        """(n, width) values before each response token."""
        assert self.critic is not None
        inputs = *batch.inputs, None, batch.logit_positions, batch.spans
        return batch.table(self.retry(partial(self.critic, "critic", *inputs)), width)

    def scores(self, batch: ResponseBatch) -> Tensor:
        """(n,) scores of the reward model at the end of each response."""
        assert self.reward is not None
        inputs = *batch.inputs, None, batch.ends, batch.spans
        return self.retry(partial(self.reward, "reward", *inputs))

    def text_loss(self, batch: Batch) -> Tensor:
        """Summed loss of the actor on text, in nats."""
        places = batch.input_ids, batch.position_ids, batch.segment_ids, batch.logit_positions
        inputs = *places, batch.target_ids, 1.0, batch.spans
        return self.retry(lambda: -self.actor("actor", *inputs)[0].sum())


@dataclass(frozen=True)
class RewardModelScorer(Scorer):
    """The reward model's score at the end of each response, by a forward pass over batches."""

    engines: Engines
    batches: Callable[[Sequence[Response]], Sequence[ResponseBatch]]  # as many on every rank
    names = (REWARD_MODEL,)

    @torch.no_grad()
    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores."""
        self.engines.eval()
        batches, device = self.batches(responses), self.engines.actor.device
        rows = torch.cat([self.engines.scores(batch.to(device)) for batch in batches])
        numbers = [n for batch in batches for n in batch.numbers]
        scores = gather_rows(numbers, rows[:, None])[:, 0]
        return Scores(scores, {REWARD_MODEL: scores})


def with_reward_model(
    scorer: Scorer,
    engines: Engines,
    batches: Callable[[Sequence[Response]], Sequence[ResponseBatch]],
) -> Scorer:
    """The scorer with that of the reward model, if there is one, which reads ``batches``."""
    if isinstance(scorer, RewardSum) and engines.reward is not None:
        return scorer.adding(RewardModelScorer(engines, batches))
    return scorer


@torch.no_grad()
def make_experience(
    engines: Engines,
    responses: Sequence[Response],
    batches: Sequence[ResponseBatch],
    scores: Scores,
    *,
    deferred: int = 0,
    from_sampler: bool = False,
) -> Experience:
    """The experience of all ranks' responses; call on every rank, with as many batches on each.

    Old log-probabilities and values of the first ``deferred`` batches are left to the update.
    ``from_sampler`` takes those log-probabilities from the decode loop, without a forward pass.
    """
    engines.eval()
    mask = response_mask(responses, engines.actor.device)
    width, with_old = mask.shape[1], deferred < len(batches)
    with_values = with_old and engines.critic is not None
    wait = engines.reference.begin(responses)
    rows = []
    for number, batch in enumerate(batches):
        batch = batch.to(engines.actor.device)
        parts = [torch.zeros(len(batch.numbers), 0, device=engines.actor.device)]
        if wait is None:
            parts.append(engines.policy(batch, width, "reference")[0])
        if with_old and not from_sampler:
            unknown = parts[0].new_full((len(batch.numbers), width), torch.nan)
            parts.append(unknown if number < deferred else engines.policy(batch, width)[0])
        if with_values:
            parts.append(engines.values(batch, width))
        rows.append(torch.cat(parts, dim=1))
    table = gather_rows([n for batch in batches for n in batch.numbers], torch.cat(rows))
    tables = list(torch.split(table, width, dim=1))
    ref_logprobs = tables.pop(0) if wait is None else padded(wait(), mask)
    logprobs = None
    if with_old:
        drawn = (response.logprobs for response in responses)
        logprobs = padded(drawn, mask) if from_sampler else tables.pop(0)
    return Experience(
        responses,
        mask & ~scores.total.isnan()[:, None],
        ref_logprobs=ref_logprobs,
        scores=scores.total,
        logprobs=logprobs,
        values=tables.pop(0) if with_values else None,
        rewards=scores.by_name,
        weights=scores.weights,
        logged_metrics=scores.metrics,
        logged_columns=scores.columns,
        scores_once_known=scores.once_known,
    )


def policies_of(
    actor: PreTrainedModel, reference: PreTrainedModel | None, *, entropy_trains: bool
) -> dict[str, Policy]:
    """Actor and reference (None: there is none) by role, over the vocabulary that both have.

    Both have one tokenizer: what a larger vocabulary has beyond it is no token.
    """
    models = {"actor": actor} | ({} if reference is None else {"reference": reference})
    size = min(model.config.vocab_size for model in models.values())
    trains = {"actor": entropy_trains, "reference": False}
    return {n: Policy(m, entropy_trains=trains[n], vocab_size=size) for n, m in models.items()}


def resolve_architecture(engines: Engines, vocab_size: int, run: OpenRun[RlhfConfig]) -> Engines:
    """The engines, adapted to how the user's models treat rows and logits; call on every rank.

    A look at one role is one at those of the same architecture: its ``own_mask`` holds for all.
    """
    device = engines.actor.device
    roles = {n: role for e in engines.trained.values() for n, role in e.module.roles.items()}
    # Of one model each, and so of one architecture; but for a reference, which may be of another.
    policies = [[engines.actor.module.policy("actor")]]
    if "reference" in roles:
        reference = engines.actor.module.policy("reference")
        of_one = policies[0][0].model.config.to_dict() == reference.model.config.to_dict()
        policies = [[*policies[0], reference]] if of_one else [*policies, [reference]]
    scorers: list[Any] = [roles[name] for name in ("critic", "reward") if name in roles]
    shares_prompts = True
    for group in filter(None, [*policies, scorers]):
        backbones = [each.backbone for each in group]
        report = check_architecture(backbones[0], vocab_size=vocab_size, device=device)
        for backbone in backbones:
            # A response in a row of its own is what any mask gets right.
            backbone.own_mask |= not report.packing_is_exact
            # Where padding is computed, a row of many branches would be mostly masked pairs.
            shares_prompts &= report.tree_is_exact and backbone.skips_padding(device)
    for group in policies:
        resolve_logits(group, vocab_size=vocab_size, device=device, run=run)
    return replace(engines, shares_prompts=shares_prompts)
