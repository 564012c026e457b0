"""KTO's objective: good and bad answers, and the divergence that they are compared with."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dschat_lora.addons.kto.batch import AnswerBatch, UnpairedBatch, UnpairedCollator
from dschat_lora.addons.kto.loss import clamped_kl, kto_loss
from dschat_lora.addons.kto.options import KtoOptions
from dschat_lora.algos.preference import accuracy
from dschat_lora.config.stages import DpoConfig, DpoStageConfig
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import sum_tensor_
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.supervised.batching import BatchLayout, context_group, resolve_packing, row_tokens
from dschat_lora.supervised.objectives import AnswerLoss, BatchLoss, Means, Network, Objective
from dschat_lora.supervised.pair_objectives import SAME_NATS, answer_logprobs
from dschat_lora.supervised.setup import SupervisedSetup

# (P,) log-probabilities of a batch's answers.
Reference = Callable[[AnswerBatch], Tensor]


def make_unpaired_layout(setup: SupervisedSetup, engine: TrainEngine[BackboneModel]) -> BatchLayout:
    """Of unpaired answers, after the same look; call on every rank."""
    tokenizer, wanted = setup.tokenizer, setup.config.data.packing
    packing = resolve_packing(engine, wanted, len(tokenizer), setup.run)
    context = context_group(setup, engine)
    collate = UnpairedCollator(int(tokenizer.pad_token_id), context=context)
    return BatchLayout(collate, packing, row_tokens(setup, engine) if packing else None)


def kto_objective(config: DpoConfig, weights: KtoOptions, reference: Reference) -> Objective:
    """Make good answers likelier and bad ones less likely; the engine is over ``CausalLMLogprobs``.

    The divergence is estimated from the mismatched answers of the whole optimizer step, or of the
    whole evaluation, before any of its losses: it does not depend on how the step is divided into
    micro-batches and over processes. ``reference`` gives (P,) log-probabilities of a batch's
    answers under the reference.
    """

    def prepare(
        engine: TrainEngine[BackboneModel], batches: Iterable[UnpairedBatch]
    ) -> Callable[[Network, UnpairedBatch], BatchLoss]:
        kl = estimate_kl(engine, batches, reference)

        def batch_loss(engine: Network, batch: UnpairedBatch) -> BatchLoss:
            with torch.no_grad():
                expected = reference(batch.answers)
            logprobs = answer_logprobs(engine, batch.answers)
            return kto_batch_loss(logprobs, expected, batch, kl, config.beta, weights)

        return batch_loss

    def alone(engine: TrainEngine[BackboneModel], batch: UnpairedBatch) -> BatchLoss:
        return prepare(engine, [batch])(engine, batch)

    return Objective(
        alone,
        "num_samples",
        lambda loss, columns: {},
        "accuracy",
        prepare=prepare,
        combine=means_by_label,
    )


@torch.no_grad()
def estimate_kl(
    engine: TrainEngine[BackboneModel], batches: Iterable[UnpairedBatch], reference: Reference
) -> Tensor:
    """Scalar estimate, in nats, from the mismatched answers of all batches; call on every rank.

    Dropout is off, whatever the engine's mode.
    """
    was_training = engine.module.training
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in batches:
        mismatched = batch.mismatched.to(engine.device)
        logratios = answer_logprobs(engine, mismatched) - reference(mismatched)
        sums[0] += logratios.double().sum()
        sums[1] += len(logratios)
    if was_training:
        engine.train()
    total, count = sum_tensor_(sums)
    return clamped_kl(total, count)


def kto_batch_loss(
    logprobs: Tensor,
    reference: Tensor,
    batch: UnpairedBatch,
    kl: Tensor,
    beta: float,
    weights: KtoOptions,
) -> BatchLoss:
    """KTO's loss summed over the answers.

    ``logprobs`` and ``reference`` are (P,), of the answers under the policy and the reference;
    ``kl`` is :func:`estimate_kl`'s.
    """
    logratios = logprobs - reference
    losses = kto_loss(
        logratios,
        batch.labels,
        kl,
        beta=beta,
        desirable_weight=weights.desirable_weight,
        undesirable_weight=weights.undesirable_weight,
    )
    lead = torch.where(batch.labels, 1.0, -1.0) * (logratios.detach() - kl)
    values = {
        "score": beta * logratios.detach(),
        "length": batch.answers.answer_lengths.float(),
        "logps": logprobs.detach(),
    }
    columns = {
        "accuracy": accuracy(lead, torch.zeros_like(lead), tolerance=SAME_NATS),
        "desirable": batch.labels.float(),
        "kl": torch.zeros_like(lead) + kl,
    }
    for side, applies in (("chosen", batch.labels), ("rejected", ~batch.labels)):
        columns |= {f"{side}_{name}": each * applies for name, each in values.items()}
    return BatchLoss(losses.sum(), columns)


def means_by_label(means: Means) -> Means:
    """Metrics from the means of :func:`kto_batch_loss`'s columns, over all answers.

    What is said of chosen and of rejected answers becomes a mean over these, None without any.
    """
    metrics = {name: means[name] for name in ("accuracy", "desirable", "kl")}
    share = means["desirable"] or 0.0
    for side, part in (("chosen", share), ("rejected", 1 - share)):
        for name in ("score", "length", "logps"):
            value = means[f"{side}_{name}"]
            metrics[f"{side}_{name}"] = value / part if part and value is not None else None
    chosen, rejected = metrics["chosen_score"], metrics["rejected_score"]
    metrics["margin"] = None if chosen is None or rejected is None else chosen - rejected
    return metrics | {
        # TRL's names
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": metrics["margin"],
        "logps/chosen": metrics.pop("chosen_logps"),
        "logps/rejected": metrics.pop("rejected_logps"),
    }


def say_balance(setup: SupervisedSetup) -> None:
    """Log how many answers are desirable, and a warning where the weights do not fit that.

    ``w_d n_d / (w_u n_u)`` is to be in [1, 4/3] (eq. 8 of arXiv:2402.01306).
    """
    labels = setup.data.train.column("label")
    good = int(labels.sum())
    bad = len(labels) - good
    setup.run.log.say(f"  labels       {good:,} desirable, {bad:,} undesirable answers")
    if warning := balance_warning(good, bad, setup.config.addons.kto):
        setup.run.log.say(f"  warning      {warning}")


def balance_warning(good: int, bad: int, weights: KtoOptions) -> str | None:
    """What is wrong with the weights for so many answers; None where nothing is."""
    if not good or not bad:
        return "all answers have one label: nothing is learnt of what tells good from bad"
    desirable, undesirable = weights.desirable_weight, weights.undesirable_weight
    ratio = desirable * good / (undesirable * bad) if undesirable else math.inf
    if 0.995 <= ratio <= 4 / 3 + 0.005:  # as two digits of a weight allow
        return None
    up, down = undesirable * bad / good, desirable * good / bad
    return (
        f"desirable answers weigh {ratio:.3g} times as much as undesirable ones, and 1 to 1.33 is "
        f"advised: give --desirable_weight {up:.3g} to {up * 4 / 3:.3g} or --undesirable_weight "
        f"{down * 3 / 4:.3g} to {down:.3g}"
    )


def _objective(config: DpoStageConfig, reference: Reference) -> Objective:
    return kto_objective(config.dpo, config.addons.kto, reference)


def _both_logprobs(engine: Network, batch: UnpairedBatch) -> Tensor:
    """(2 P,) of each prompt's own answer and of the mismatched one."""
    return torch.cat([answer_logprobs(engine, each) for each in (batch.answers, batch.mismatched)])


KTO = AnswerLoss(UnpairedCollator, make_unpaired_layout, _objective, _both_logprobs, say_balance)
