"""The figures of an iteration: what the responses were like, and what the update did."""

import math

import torch
from torch import Tensor

from dschat_lora.algos.advantages import explained_variance, response_sums
from dschat_lora.algos.kl import kl_k3
from dschat_lora.algos.preference import correlation
from dschat_lora.rlhf.experience import Experience
from dschat_lora.rlhf.update import StepResult


def update_metrics(results: list[StepResult]) -> dict[str, float | None]:
    """Means over an iteration's steps, weighted by tokens; norms are those of the last one."""
    tokens = sum(result.num_tokens for result in results)

    def mean(name: str) -> float | None:
        values = [(getattr(result, name), result.num_tokens) for result in results]
        if any(value is None for value, _ in values):
            return None
        return sum(value * weight for value, weight in values) / tokens

    names = ("policy_loss", "value_loss", "text_loss", "entropy", "clip_fraction")
    found = {name: mean(name) for name in (*names, "value_clip_fraction", "approx_kl")}
    if found["text_loss"] is None:
        del found["text_loss"]
    last = results[-1].outcomes
    norms = {
        "grad_norm": last["actor"].grad_norm,
        "loss_scale": last["actor"].loss_scale,
        "skipped": results[-1].skipped,
    }
    if "critic" in last:
        norms["critic_grad_norm"] = last["critic"].grad_norm
    return {**found, **norms, "ratio_error": results[0].ratio_error}


def learning_rates_of(result: StepResult) -> dict[str, float | None]:
    """The actor's learning rates by the contract's names, and the critic's."""
    found: dict[str, float | None] = {}
    for role, prefix in (("actor", ""), ("critic", "critic_")):
        groups = result.learning_rates.get(role)
        if groups is not None:
            lora = [rate for name, rate in groups.items() if name.startswith("lora")]
            base = [rate for name, rate in groups.items() if not name.startswith("lora")]
            found[f"{prefix}learning_rate"] = (base or lora)[0]
            found[f"{prefix}lora_learning_rate"] = lora[0] if lora else None
    return found


def response_metrics(
    experience: Experience, scores: Tensor, returns: Tensor | None
) -> dict[str, float | int | None]:
    """What the responses were like, and how well they were foreseen."""
    responses, counts, mask = experience.responses, experience.counts, experience.mask
    kept = [r for r, counted in zip(responses, counts.tolist(), strict=True) if counted]
    assert experience.logprobs is not None
    raw = experience.scores[counts].double()
    kl = response_sums(experience.kl(), mask)[counts].double()
    k3 = response_sums(kl_k3(experience.logprobs, experience.ref_logprobs), mask)[counts].double()
    lengths = torch.tensor([float(len(r.tokens)) for r in kept], dtype=torch.float64)
    eos_rate = sum(r.ended for r in kept) / len(kept)
    explained = None
    if returns is not None and experience.values is not None:
        explained = float(explained_variance(experience.values, returns, mask))
    return {
        **drawn_alike(experience),
        "reward": float(raw.mean()),
        "reward_std": float(raw.std(correction=0)),
        "scaled_reward": float(scores[counts].double().mean()),
        "kl": float(kl.mean()),
        "kl_k3": float(k3.mean()),
        "kl_standard_error": float(kl.std(correction=0)) / math.sqrt(len(kept)),
        "explained_variance": explained,
        "response_length": float(lengths.mean()),
        "reward_length_correlation": correlation(raw.cpu(), lengths),
        "eos_rate": eos_rate,
        "truncated_fraction": 1 - eos_rate,
        "dropped": len(responses) - len(kept),
        "samples": len(responses),
        "tokens": sum(map(len, responses)),
        "supervised_tokens": sum(len(r.tokens) for r in responses),
    }


def drawn_alike(experience: Experience) -> dict[str, float]:
    """How far log-probabilities in the decode loop are from those that are trained on, in nats."""
    table = torch.zeros(experience.mask.shape)
    for row, response in enumerate(experience.responses):
        table[row, : len(response.logprobs)] = torch.tensor(response.logprobs)
    assert experience.logprobs is not None
    errors = (table.to(experience.mask.device) - experience.logprobs).abs()[experience.mask]
    return {"sampler_error": float(errors.mean()), "sampler_error_max": float(errors.max())}
