"""Trainers in processes of :class:`helpers.ranks.Ranks`, and sequences for them."""

import random

from dschat_lora.addons.trainer import build as trainer_build
from dschat_lora.addons.trainer.trainer import Trainer
from dschat_lora.engine.distributed import data_rank, data_world_size

PROMPTS = ["\n\nHuman: Which is larger, 10 or 16?\n\nAssistant:", "The capital", "Count: a b"]
VOCABULARY = 900


def random_sequences(count, *, seed=0, longest=14):
    """Sequences with all that any loss reads; some tokens do not count, others count by half."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        size = draw.randint(3, longest)
        advantage = draw.choice([-1.5, -0.5, 1.0, 2.0])
        found.append(
            {
                "tokens": [draw.randrange(10, VOCABULARY) for _ in range(size)],
                "weights": [draw.choice([0.0, 0.5, 1.0, 1.0]) for _ in range(size - 1)] + [1.0],
                "logprobs": [draw.uniform(-9, -5) for _ in range(size)],
                "old_logprobs": [draw.uniform(-9, -5) for _ in range(size)],
                "ref_logprobs": [draw.uniform(-9, -5) for _ in range(size)],
                "advantages": [advantage + draw.uniform(-0.3, 0.3) for _ in range(size)],
            }
        )
    return found


def options(stage, **more):
    """Those of a Trainer at a ZeRO stage."""
    # Else ZeRO 3 keeps parameters as small as these whole on every rank.
    json = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else None
    return {
        "lora_dim": 4,
        "seed": 1,
        # At 1e-8 a gradient that is rounding alone, as some are here, would make a whole step.
        "adam_epsilon": 1e-5,
        "per_device_train_batch_size": 2,
        "zero_stage": stage,
        "deepspeed_config": json,
        **more,
    }


def train(*, stage, directory=None, **more):
    """What a Trainer gives on this rank's share of all sequences, and on its own prompts.

    Three steps of two or three calls each; at the last call of a step all ranks but the first have
    nothing.
    """
    first, count = data_rank(), data_world_size()
    with Trainer(**options(stage, **more)) as trainer:
        losses, norms = [], []
        for step in range(3):
            whole = random_sequences(9, seed=step)
            losses.append(trainer.forward_backward(whole[first::count], "cross_entropy"))
            pairs = [whole[n : n + 2] for n in range(0, 8, 2)][first::count]
            pairs = [each for pair in pairs for each in pair]
            losses.append(trainer.forward_backward(pairs, "dpo", beta=0.3))
            some = random_sequences(3, seed=50 + step) if first == 0 else []
            losses.append(trainer.forward_backward(some, "ppo"))
            norms.append(trainer.optim_step(5e-3).grad_norm)
        whole = random_sequences(5, seed=99)
        numbers = range(len(PROMPTS))[first::count]
        logprobs = trainer.logprobs(whole[first::count])
        drawn = trainer.sample(
            [PROMPTS[n] for n in numbers],
            num_samples=2,
            max_tokens=6,
            seed=[(7, n) for n in numbers],
        )
        if directory is not None:
            trainer.save(directory)
        return {
            "losses": losses,
            "norms": norms,
            "logprobs": [each.tolist() for each in logprobs],
            "tokens": [[sample.tokens for sample in each] for each in drawn],
        }


def sample_in_shards(*, small):
    """Samples at ZeRO 3 where the memory does not hold the whole weights, of rank 0's prompts."""
    fits = trainer_build.whole_weights_fit
    trainer_build.whole_weights_fit = lambda *_: not small
    prompts = PROMPTS if data_rank() == 0 else []
    try:
        with Trainer(**options(3)) as trainer:
            found = trainer.sample(prompts, num_samples=2, max_tokens=3, seed=3)
            # The engine still trains.
            loss = trainer.forward_backward(random_sequences(2))
            trainer.optim_step(1e-3)
    finally:
        trainer_build.whole_weights_fit = fits
    return {"tokens": [[sample.tokens for sample in each] for each in found], "loss": loss}


def go_on(*, stage, directory, has_past=True, **more):
    """The loss of a step after what was saved is loaded, and then of the next.

    Where it ``has_past``, the steps and a gradient from before are gone.
    """
    first, count = data_rank(), data_world_size()
    with Trainer(**options(stage, **more)) as trainer:
        if has_past:
            for step in range(2):
                trainer.forward_backward(random_sequences(4, seed=step))
                trainer.optim_step(1e-2)
            trainer.forward_backward(random_sequences(4))
        trainer.load(directory)
        losses = []
        for step in range(2):
            whole = random_sequences(8, seed=70 + step)
            losses.append(trainer.forward_backward(whole[first::count]))
            trainer.optim_step(5e-3)
        return {"losses": losses, "step": trainer.step}


def refused(*, sequences):
    """The message of each rank, where rank r passes ``sequences[r]``."""
    with Trainer(**options(0)) as trainer:
        try:
            trainer.forward_backward(sequences[data_rank()])
        except ValueError as error:
            words = str(error)
        # All ranks have come back: they go on together.
        return {"words": words, "loss": trainer.forward_backward(random_sequences(2))}
