"""GRPO, as one would read it in a paper: sample, compare within groups, clip, step.

    python examples/grpo.py

trains the bundled model to answer in about thirty characters, in half a minute on a CPU core. Set
OMP_NUM_THREADS=1 where other programs use the cores: it takes minutes otherwise. Group relative
policy optimisation is from DeepSeekMath (arXiv:2402.03300): for each prompt q a group of answers
o_1, ..., o_G is drawn from the policy, and the advantage of an answer is its reward, normalised
within the group (4.1.2).

Losses and rewards are those of ``dl.rlhf(..., algorithm="grpo")`` with the same settings, to 1e-5,
as a test shows. ``dl.rlhf`` adds checkpoints, evaluations, reports, and many processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

import dschat_lora as dl
from dschat_lora.rl.draw.source import PromptOrder

PROMPTS_PER_ITERATION = 8
GROUP_SIZE = 4  # G, answers to each prompt
MAX_TOKENS = 16  # of an answer
ITERATIONS = 40
UPDATES = 2  # mu, steps on the answers of an iteration
LEARNING_RATE = 1e-3
CLIP = 0.2  # epsilon
KL_COEF = 0.05  # beta
SEED = 1234

Reward = Callable[[str], float]


def about_thirty(answer: str) -> float:
    """0 for an answer of thirty characters, less for longer and for shorter ones."""
    return -abs(len(answer) - 30) / 30


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """``A_i = (r_i - mean(r)) / std(r)`` of the answers to one prompt."""
    center, spread = mean(rewards), stdev(rewards)
    return [(reward - center) / (spread + 1e-4) for reward in rewards]


def token_losses(logprobs: Tensor, sequence: Mapping[str, Any]) -> Tensor:
    """(T,) losses of a sequence's tokens, the negated terms of eq. 3 and 4.

    ``logprobs`` are those of the policy that trains, ``sequence["logprobs"]`` those with which the
    tokens were drawn, and ``sequence["ref_logprobs"]`` the reference's. The mean over all tokens of
    all answers is taken by the trainer; weights of 0 leave the prompt out.
    """
    advantage = torch.as_tensor(sequence["advantages"])
    drawn = torch.as_tensor(sequence["logprobs"])
    ratio = torch.exp(logprobs - drawn)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    # An unbiased, positive estimate of the divergence (http://joschu.net/blog/kl-approx.html, k3).
    log_ratio = torch.as_tensor(sequence["ref_logprobs"]) - logprobs
    divergence = torch.exp(log_ratio) - log_ratio - 1
    return -(surrogate - KL_COEF * divergence)


def answer_groups(
    trainer: dl.Trainer, prompts: Sequence[str], reward: Reward, *, iteration: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """A group of answers to each prompt, with their advantages, and all rewards."""
    groups = trainer.sample(
        prompts, num_samples=GROUP_SIZE, max_tokens=MAX_TOKENS, seed=(SEED, iteration)
    )
    sequences: list[dict[str, Any]] = []
    rewards: list[float] = []
    for prompt, answers in zip(prompts, groups, strict=True):
        own = [reward(answer.text) for answer in answers]
        rewards += own
        asked = trainer.encode(prompt)
        nothing = [0.0] * len(asked)  # of the prompt
        for answer, advantage in zip(answers, group_advantages(own), strict=True):
            sequences.append(
                {
                    "tokens": [*asked, *answer.tokens],
                    "weights": [*nothing, *([1.0] * len(answer.tokens))],
                    "logprobs": [*nothing, *answer.logprobs],
                    "advantages": [*nothing, *([advantage] * len(answer.tokens))],
                }
            )
    return sequences, rewards


def train(
    prompts: Sequence[str],
    reward: Reward,
    *,
    model: str | None = None,
    directory: str,
    iterations: int = ITERATIONS,
) -> list[dict[str, float]]:
    """Train an adapter of rank 8, write it to a directory, and give the figures of each step.

    Args:
        prompts: to answer, in a new random order each epoch.
        reward: of an answer's text.
        model: hub name or path; the bundled model when absent.
        directory: for the adapter, in PEFT's format.
        iterations: of sampling and updating.
    """
    order = PromptOrder(len(prompts), per_iteration=PROMPTS_PER_ITERATION, seed=SEED)
    figures = []
    with (
        dl.Trainer(model, lora_dim=8, seed=SEED) as policy,
        dl.Trainer(model, lora_dim=8, seed=SEED) as reference,
    ):
        for iteration in range(iterations):
            chosen = [prompts[number] for number in order(iteration)]
            sequences, rewards = answer_groups(policy, chosen, reward, iteration=iteration)
            for sequence, logprobs in zip(sequences, reference.logprobs(sequences), strict=True):
                sequence["ref_logprobs"] = logprobs
            for _ in range(UPDATES):
                loss = policy.forward_backward(sequences, loss=token_losses)
                policy.optim_step(learning_rate=LEARNING_RATE)
                figures.append({"iteration": iteration + 1, "reward": mean(rewards), "loss": loss})
                print(json.dumps(figures[-1]))
        policy.export_adapter(directory)
    return figures


def bundled_prompts(count: int = 24) -> list[str]:
    """The first prompts of the bundled data."""
    lines = Path(dl.BUNDLED_DATA["train"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:count]]


if __name__ == "__main__":
    train(bundled_prompts(), about_thirty, directory="output/grpo_adapter")
