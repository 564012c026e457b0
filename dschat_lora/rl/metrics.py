"""Metrics of an iteration, of its responses and of its update, and what the log says of them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import equal_groups, explained_variance, response_sums
from dschat_lora.algos.kl import kl_k3
from dschat_lora.algos.preference import correlation
from dschat_lora.rl.batch import Response
from dschat_lora.rl.experience import AdvantagesAndReturns, Experience
from dschat_lora.rl.update import StepResult
from dschat_lora.rl.user_functions import messages_after_prompt
from dschat_lora.runtime.lr_schedule import rate_metrics


def update_metrics(results: Sequence[StepResult]) -> dict[str, float | None]:
    """Learning rates, and means over an iteration's steps, weighted by tokens.

    Gradient norms are those of the last step.
    """
    tokens = sum(result.num_tokens for result in results)

    def mean(name: str) -> float | None:
        values = [(getattr(result, name), result.num_tokens) for result in results]
        if any(value is None for value, _ in values):
            return None
        return sum(value * weight for value, weight in values) / tokens

    names = ("policy_loss", "value_loss", "text_loss", "entropy", "clip_fraction")
    means = {name: mean(name) for name in (*names, "value_clip_fraction", "approx_kl")}
    if means["text_loss"] is None:
        del means["text_loss"]
    last = results[-1].outcomes
    actor = last.get("actor")  # None while the critic alone learns
    norms = {
        "grad_norm": None if actor is None else actor.grad_norm,
        "loss_scale": None if actor is None else actor.loss_scale,
        "skipped": results[-1].skipped,
    }
    if "critic" in last:
        norms["critic_grad_norm"] = last["critic"].grad_norm
    return {
        "loss": means["policy_loss"],
        **_learning_rates(results[-1]),
        **means,
        **norms,
        "ratio_error": results[0].ratio_error,
    }


def _learning_rates(result: StepResult) -> dict[str, float | None]:
    """The rates of base and LoRA parameters: the actor's, and the critic's with a prefix."""
    rates = rate_metrics(result.learning_rates["actor"])
    if "critic" in result.learning_rates:
        critic = rate_metrics(result.learning_rates["critic"])
        rates |= {f"critic_{name}": rate for name, rate in critic.items()}
    return rates


def response_metrics(
    experience: Experience, rewards: Tensor, targets: AdvantagesAndReturns | None
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
    lengths = torch.tensor([float(r.num_actor_tokens) for r in kept], dtype=torch.float64)
    eos_rate = sum(r.ended for r in kept) / len(kept)
    explained = None
    if targets is not None and targets.returns is not None and experience.values is not None:
        explained = float(explained_variance(experience.values, targets.returns, mask))
    return {
        **sampler_errors(experience),
        "reward": float(scores.mean()),
        "reward_std": float(scores.std(correction=0)),
        **rewards_by_name(experience),
        **_equal_prompts(experience),
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
        **turn_metrics(kept),
    }


def turn_metrics(responses: Sequence[Response]) -> dict[str, float]:
    """Mean number of the actor's turns and of tokens read from an environment, if any has some."""
    if not any(each.actor_mask for each in responses):
        return {}
    turns = sum(_num_turns(each) for each in responses)
    read = sum(len(each.tokens) - each.num_actor_tokens for each in responses)
    return {"turns": turns / len(responses), "environment_tokens": read / len(responses)}


def _num_turns(response: Response) -> int:
    earlier = json.loads(response.earlier or b"[]")
    return 1 + sum(message["role"] == "assistant" for message in earlier)


# Responses of an iteration whose advantages, KL and values are kept token by token.
ROWS_BY_TOKEN = 4


def rollout_rows(
    experience: Experience,
    targets: AdvantagesAndReturns | None,
    decode: Callable[..., str],
    *,
    iteration: int,
    most: int,
) -> list[dict[str, Any]]:
    """The first ``most`` responses for :class:`dschat_lora.report.rollouts.RolloutLog`.

    The advantage is the mean over a response's tokens. What is not known, such as the reward of a
    response that does not count, is None. The first few have advantage, KL and value of each of the
    actor's tokens under ``token_advantage`` and so on, beside ``tokens``.
    """
    count = min(most, len(experience.responses))
    lengths = experience.mask.sum(1).clamp(min=1)
    names = dict(experience.rewards) or {"reward_model": experience.scores}
    columns = {f"rewards/{name}": scores for name, scores in names.items()}
    columns["reward"] = experience.scores
    if targets is not None:
        columns["advantage"] = response_sums(targets.advantages, experience.mask) / lengths
    if experience.logprobs is not None:
        columns["kl"] = response_sums(experience.kl(), experience.mask)
    table, by_token = _on_host(columns, _token_columns(experience, targets), count)
    rows = []
    for response, numbers in zip(experience.responses[:count], table, strict=True):
        known = {n: None if math.isnan(x) else x for n, x in zip(columns, numbers, strict=True)}
        counts = known["reward"] is not None
        rows.append(
            {
                "iteration": iteration,
                "prompt": decode(response.prompt),
                "response": decode(response.tokens, skip_special_tokens=True),
                "ended": response.ended,
                "rewards": {name: known[f"rewards/{name}"] for name in names},
                "reward": known["reward"],
                "advantage": known.get("advantage") if counts else None,
                "kl": known.get("kl") if counts else None,
                "length": response.num_actor_tokens,
            }
        )
        if response.earlier:
            text = decode(response.last_turn, skip_special_tokens=True)
            rows[-1]["messages"] = messages_after_prompt(response, text)
    for row, (index, found) in zip(rows, enumerate(by_token), strict=False):
        response = experience.responses[index]
        tokens = list(compress(response.tokens, response.actor_mask or repeat(True)))
        if row["reward"] is not None:
            row["tokens"] = [decode([token]) for token in tokens]
            row |= {name: values[: len(tokens)] for name, values in found.items()}
    return rows


def _token_columns(
    experience: Experience, targets: AdvantagesAndReturns | None
) -> dict[str, Tensor]:
    """(N, R) of what is known of each token of the responses, by name."""
    known = {"token_advantage": None if targets is None else targets.advantages}
    known["token_kl"] = None if experience.logprobs is None else experience.kl()
    known["token_value"] = experience.values
    return {name: column for name, column in known.items() if column is not None}


def _on_host(
    columns: Mapping[str, Tensor], of_tokens: Mapping[str, Tensor], count: int
) -> tuple[list[list[float]], list[dict[str, list[float]]]]:
    """Rows of the first ``count`` of (N,) columns and, of fewer, (N, R) columns by name.

    The device is waited for once.
    """
    detailed = min(count, ROWS_BY_TOKEN)
    parts = [torch.stack([column[:count].double() for column in columns.values()], dim=1)]
    parts += [column[:detailed].double() for column in of_tokens.values()]
    flat = iter(torch.cat([part.flatten() for part in parts]).tolist())
    table, *tokens = (
        [[next(flat) for _ in range(part.shape[1])] for _ in range(part.shape[0])] for part in parts
    )
    rounded = [
        {
            name: [float(f"{value:.4g}") for value in rows[row]]
            for name, rows in zip(of_tokens, tokens, strict=True)
        }
        for row in range(detailed)
    ]
    return table, rounded


def rewards_by_name(experience: Experience) -> dict[str, float]:
    """Mean and standard deviation of what each function scored, over responses that count."""
    found = {}
    for name, scores in experience.rewards.items():
        counted = scores[experience.counts].double()
        found[f"reward/{name}"] = float(counted.mean())
        found[f"reward/{name}_std"] = float(counted.std(correction=0))
    return found


def _equal_prompts(experience: Experience) -> dict[str, int]:
    """Prompts of which no two responses have different scores, where they have several."""
    groups = [each.group for each in experience.responses]
    if len(set(groups)) == len(groups):
        return {}
    return {"equal_prompts": len(equal_groups(experience.scores.tolist(), groups))}


def importance_metrics(importance: Tensor | None, mask: Tensor, cap: float) -> dict[str, float]:
    """Mean weight of the tokens that count, and the share at the ``cap``; nothing without weights.

    ``importance`` and ``mask`` are (N, R).
    """
    if importance is None:
        return {}
    weights = importance[mask].double()
    at_cap = (weights >= cap).double().mean()
    return {"importance_weight": float(weights.mean()), "importance_capped": float(at_cap)}


def sampler_errors(experience: Experience) -> dict[str, float]:
    """|decode loop's minus old log-probabilities| over the tokens that count, in nats."""
    assert experience.logprobs is not None
    table = experience.table(response.logprobs for response in experience.responses)
    errors = (table - experience.logprobs).abs()[experience.mask]
    return {"sampler_error": float(errors.mean()), "sampler_error_max": float(errors.max())}
