"""Rows that an iteration writes to the rollouts of its run."""

import math
from collections.abc import Callable, Mapping
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import response_sums
from dschat_lora.engine.distributed import rank
from dschat_lora.report.appended_file import AppendedFile
from dschat_lora.report.rollouts import as_member
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Experience
from dschat_lora.rl.response.response import messages_after_prompt

# Responses of an iteration whose advantages, KL and values are kept token by token.
ROWS_BY_TOKEN = 4


class RolloutLog:
    """Writes the first ``most`` responses of each iteration to ``file``, on the first rank."""

    name = "rollouts"

    def __init__(
        self,
        file: AppendedFile,
        decode: Callable[..., str],
        *,
        most: int,
        iteration: Callable[[], int],
    ) -> None:
        self._file, self._decode, self._most, self._iteration = file, decode, most, iteration
        self.state, self.restore, self.before_checkpoint = file.state, file.restore, file.sync

    def after_iteration(self, experience: Experience, targets: AdvantagesAndReturns | None) -> None:
        """Append an iteration's responses."""
        if self._most and rank() == 0:
            iteration = self._iteration()
            rows = rollout_rows(
                experience, targets, self._decode, iteration=iteration, most=self._most
            )
            self._file.append(as_member(rows))


def rollout_rows(
    experience: Experience,
    targets: AdvantagesAndReturns | None,
    decode: Callable[..., str],
    *,
    iteration: int,
    most: int,
) -> list[dict[str, Any]]:
    """The first ``most`` responses for :func:`dschat_lora.report.rollouts.as_member`.

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
    rows: list[dict[str, Any]] = []
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
                **({} if (n := response.origin.policy_version) is None else {"policy_version": n}),
            }
        )
        if response.episode.earlier:
            rows[-1]["messages"] = messages_after_prompt(response, decode)
        if response.episode.earlier_sequences:
            rows[-1]["earlier_sequences"] = [
                {"prompt": decode(each.prompt), "response": decode(each.tokens)}
                for each in response.episode.earlier_sequences
            ]
        if response.episode.failure:
            rows[-1]["failure"] = response.episode.failure
        if logged := experience.logged_columns:
            rows[-1]["extra"] = {name: entries[len(rows) - 1] for name, entries in logged.items()}
    for row, response, found in zip(rows, experience.responses, by_token, strict=False):
        tokens = [
            token
            for each in response.sequences
            for token in compress(each.tokens, each.actor_mask or repeat(True))
        ]
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
