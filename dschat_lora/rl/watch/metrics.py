"""Metrics of an iteration, its responses and its update."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import explained_variance, response_sums
from dschat_lora.algos.kl import kl_k3
from dschat_lora.algos.preference import correlation
from dschat_lora.algos.segments import to_device
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Experience, idle_groups
from dschat_lora.rl.learn.update import StepResult, Updater
from dschat_lora.rl.options.algorithms import Algorithm, RolloutCorrection
from dschat_lora.rl.options.config import RlhfConfig, RolloutConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import REWARD_MODEL, Shaped
from dschat_lora.runtime.loop import rate_metrics

# The decode loop computes one token at a time, by other kernels: mean error in nats per token.
SAMPLER_TOLERANCE = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.02}
SAMPLER_LIMIT = 5  # so many times that no rounding explains
# Mean distance in nats per token from another engine that no kernels or types explain.
ENGINE_LIMIT = 0.5


def iteration_metrics(
    results: Sequence[StepResult],
    updater: Updater,
    experience: Experience,
    shaped: Shaped,
    config: RlhfConfig,
) -> dict[str, float | int | None]:
    """Metrics of an iteration's steps, its responses with their shaped rewards, and the sampler."""
    batch, correction = config.batch, config.ppo.correction
    rewards = shaped.rewards if experience.scores_once_known is None else experience.scores
    pairs = zip(experience.responses, experience.counts.tolist(), strict=True)
    metrics: dict[str, float | int | None] = {
        **update_metrics(results),
        **sampler_errors(updater.computed, bounds=batch.do_sample),
        **response_metrics(experience, rewards, updater.targets, config.ppo.rules),
        **config.response_metrics(experience.responses, [each for each, counts in pairs if counts]),
        "score_clip_fraction": shaped.clip_fraction,
        "updates": len(results),
    }
    # Sampler and policy may differ by more than rounding.
    if batch.do_sample and (not batch.engine.exact or correction is not None):
        metrics |= importance_metrics(updater.importance, updater.experience, correction)
    return metrics


def update_metrics(results: Sequence[StepResult]) -> dict[str, float | None]:
    """Learning rates, and means over an iteration's steps, weighted by tokens.

    Gradient norms are those of the last step.
    """
    tokens, last = sum(result.num_tokens for result in results), results[-1]
    means = dict[str, float | None]()
    names = ("loss", "policy_loss", "value_loss", "text_loss", "entropy", "clip_fraction")
    for name in (*names, "value_clip_fraction", "approx_kl"):
        known = getattr(results[0], name) is not None  # in all steps or in none
        weighted = (getattr(each, name) * each.num_tokens for each in results if known)
        if known or name != "text_loss":
            means[name] = sum(weighted) / tokens if known else None
    actor = last.outcomes.get("actor")  # None while the critic alone learns
    norms = {
        "grad_norm": None if actor is None else actor.grad_norm,
        "loss_scale": None if actor is None else actor.loss_scale,
        "skipped": last.skipped,
    }
    if "critic" in last.outcomes:
        norms["critic_grad_norm"] = last.outcomes["critic"].grad_norm
    rates = rate_metrics(last.learning_rates["actor"])  # of base and LoRA parameters
    if "critic" in last.learning_rates:
        critic = rate_metrics(last.learning_rates["critic"])
        rates |= {f"critic_{name}": rate for name, rate in critic.items()}
    first = {"loss": means.pop("loss")}
    return first | rates | means | norms | {"ratio_error": results[0].ratio_error}


def response_metrics(
    experience: Experience,
    rewards: Tensor,
    targets: AdvantagesAndReturns | None,
    algorithm: Algorithm,
) -> dict[str, float | int | None]:
    """Scores, KL, lengths and ends of the responses, and how well the critic predicts returns."""
    responses, mask = experience.responses, experience.mask
    assert experience.logprobs is not None
    k3 = kl_k3(experience.logprobs, experience.ref_logprobs)
    columns = [experience.scores, response_sums(experience.kl(), mask), response_sums(k3, mask)]
    table = torch.stack([*columns, rewards], dim=1).cpu().double()  # read at once
    counts = ~table[:, 0].isnan()
    kept = [r for r, counted in zip(responses, counts.tolist(), strict=True) if counted]
    scores, kl, k3, scaled = table[counts].unbind(1)
    lengths = torch.tensor([r.num_actor_tokens for r in kept], dtype=torch.float64)
    eos_rate = sum(r.ended for r in kept) / len(kept)
    groups, equal, explained = [each.group for each in responses], {}, None
    if len(set(groups)) < len(groups):  # prompts whose responses teach nothing, of one score say
        known = experience.scores, experience.rewards, experience.weights
        equal["equal_prompts"] = len(idle_groups(algorithm, groups, *known))
        equal["prompts"] = len(set(groups))
    if targets is not None and targets.returns is not None and experience.values is not None:
        explained = float(explained_variance(experience.values, targets.returns, mask))
    return {
        "reward": float(scores.mean()),
        "reward_std": float(scores.std(correction=0)),
        **rewards_by_name(experience),
        **equal,
        "scaled_reward": float(scaled.mean()),
        "kl": float(kl.mean()),
        "kl_k3": float(k3.mean()),
        "kl_standard_error": float(kl.std(correction=0)) / math.sqrt(len(kept)),
        "explained_variance": explained,
        "response_length": float(lengths.mean()),
        "reward_length_correlation": correlation(scores, lengths),
        "eos_rate": eos_rate,
        "truncated_fraction": 1 - eos_rate,
        "dropped": len(responses) - len(kept),
        "undrawn": sum(each.undrawn for each in responses),
        "samples": len(responses),
        "tokens": sum(map(len, responses)),
        "supervised_tokens": sum(r.num_actor_tokens for r in responses),
    }


def source_metrics(responses: Sequence[Response], names: Sequence[str]) -> dict[str, int]:
    """Responses to the rows of each source, and their tokens."""
    metrics: dict[str, int] = {}
    for number, name in enumerate(names):
        own = [len(each) for each in responses if each.origin.source == number]
        metrics |= {f"samples/{name}": len(own), f"tokens/{name}": sum(own)}
    return metrics


def rewards_by_name(experience: Experience) -> dict[str, float]:
    """Mean and deviation of each of several rewards, and the metrics that functions logged."""
    metrics, alone = {}, set(experience.rewards) == {REWARD_MODEL}
    for name, scores in experience.rewards.items() if not alone else ():
        counted = scores[experience.counts & ~scores.isnan()].double()
        if len(counted):
            metrics[f"reward/{name}"] = float(counted.mean())
            metrics[f"reward/{name}_std"] = float(counted.std(correction=0))
    return metrics | {f"logged/{name}": value for name, value in experience.logged_metrics.items()}


def importance_metrics(
    importance: Tensor | None, experience: Experience, correction: RolloutCorrection | None
) -> dict[str, float]:
    """How far sampler and policy are apart, and what the weights of tokens make of it.

    The mean of the (N, R) weights ``importance`` of the tokens that count, and the share of those
    that bounds cut or mask; nothing of weights where there are none.
    """
    mismatch = experience.mismatch(correction)
    apart = {"rollout_kl": mismatch.kl, "rollout_ratio_max": mismatch.largest_ratio}
    if importance is None or correction is None:
        return apart
    weights = importance[experience.mask].double()
    name = "importance_masked" if correction.masks else "importance_capped"
    hit = weights == 0 if correction.masks else weights >= correction.cap
    return apart | {"importance_weight": float(weights.mean()), name: float(hit.double().mean())}


def version_metrics(responses: Sequence[Response], iteration: int) -> dict[str, float]:
    """By how many iterations the adapters that drew responses are behind, where they may be."""
    lags = [iteration - v for r in responses if (v := r.origin.policy_version) is not None]
    return {"rollout_version_lag": sum(lags) / len(lags)} if lags else {}


def sampler_errors(experience: Experience, *, bounds: bool = False) -> dict[str, float]:
    """|decode loop's minus old log-probabilities| over the tokens that count, in nats.

    Where an engine knows but those of what it drew from, and ``bounds`` says that these are larger,
    as after top-p and top-k: by how much they are smaller, which no filter makes them.
    """
    assert experience.logprobs is not None
    table = experience.table(response.logprobs for response in experience.responses)
    drawn = to_device(torch.tensor([r.origin.is_drawn for r in experience.responses]), table.device)
    chosen = experience.mask & drawn[:, None]
    if not chosen.any():
        return {}
    errors = (table - experience.logprobs).abs()[chosen]
    if table[chosen].isnan().any():
        if not bounds:
            return {}
        filtered = experience.table(response.sampler_logprobs for response in experience.responses)
        errors = (experience.logprobs - filtered).clamp(min=0)[chosen]
        if errors.isnan().any():  # an engine that knows none
            return {}
    return {"sampler_error": float(errors.mean()), "sampler_error_max": float(errors.max())}


def check_sampler(metrics: Mapping[str, Any], dtype: str, rollouts: RolloutConfig) -> None:
    """Stop a run whose responses are another policy's than the one that learns.

    Raises:
        ValueError: if the two passes differ by more than rounding could make of them.
    """
    error, limit = metrics.get("sampler_error", 0.0), SAMPLER_LIMIT * SAMPLER_TOLERANCE[dtype]
    engine = rollouts.engine
    if error <= min(limit, ENGINE_LIMIT) or not engine.same_model:
        return
    # An older adapter is another policy.
    if not engine.in_process and error > ENGINE_LIMIT and not metrics.get("rollout_version_lag"):
        raise ValueError(
            f"--rollout_engine {rollouts.rollout_engine} samples from a different model: its "
            f"log-probabilities are {error:.2g} nats per token from the actor's (more than "
            f"{ENGINE_LIMIT:g}); does it serve the actor's base, with the same dtypes?"
        )
    if engine.in_process and error > limit:
        raise ValueError(
            f"the decode loop's log-probabilities are {error:.2g} nats per token from those used "
            f"in training, which rounding in {dtype} does not explain (more than {limit:g}): this "
            "model is not decoded or trained correctly, so the run stops"
        )
