"""What the processes of :class:`helpers.ranks.Ranks` do: step 3 on given responses."""

import math
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.samples import SequenceSample
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.average import MovingAverage
from dschat_lora.rl.learn.engines import Engines, RewardModelScorer, make_experience
from dschat_lora.rl.learn.experience import Steps, advantages_and_returns, count_deferred
from dschat_lora.rl.learn.pretraining import Pretraining
from dschat_lora.rl.learn.update import Updater
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import Minibatch, collate, make_minibatches
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, Scores
from dschat_lora.rl.score.user_functions import TrainerState
from dschat_lora.runtime.setup import shard_model
from helpers.plain_ppo import LONGEST
from helpers.recorded import record, recordable
from helpers.roles import Words, config_of, networks_of, roles_of
from helpers.runs import engine_settings, release
from helpers.tiny import VOCAB

SEED = 3


def ragged_responses(count, *, group_size=1, seed=0):
    """[prompt, tokens, group] of each response, lists of unlike lengths."""
    generator = np.random.default_rng(seed)

    def tokens(low, high):
        return generator.integers(3, VOCAB, int(generator.integers(low, high))).tolist()

    responses = []
    for number in range(count):
        group, copy = divmod(number, group_size)
        prompt = responses[-1][0] if copy else tokens(1, 7)
        responses.append([prompt, tokens(1, 9), group])
    return responses


def ragged_texts(count, *, seed=7):
    """Token lists of pretraining text."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(3, VOCAB, int(generator.integers(2, 12))).tolist() for _ in range(count)
    ]


def steps_of(responses, iteration, *, epochs, rows_per_step, micro, rank=0, world_size=1):
    """The steps of all passes, as a run deals them."""
    lengths = [len(prompt) + len(tokens) for prompt, tokens, _ in responses]
    return [
        step
        for number in range(epochs)
        for step in make_minibatches(
            lengths,
            rows_per_step=rows_per_step,
            micro_batch_size=micro,
            rank=rank,
            world_size=world_size,
            key=("minibatches", SEED, iteration, number),
        )
    ]


def factor_of(step):
    """A rate for every step of an iteration, passed over or not."""
    return 1 / (1 + step / 4)


def text_loader(texts, *, micro, accumulation, rank=0, world_size=1):
    samples = []
    for ids in texts:
        ids = np.array(ids, dtype=np.int32)
        samples.append(SequenceSample.of(ids, ids.copy()))
    return StepLoader(
        samples,
        rows=[[n] for n in range(len(texts))],
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        rank=rank,
        world_size=world_size,
        seed=SEED,
        collate=SampleCollator(0),
    )


def iterate(
    base,
    actor,
    reward,
    *,
    algorithm,
    options,
    iterations,
    rows_per_step,
    micro,
    rate,
    max_grad_norm=1.0,
    stage=0,
    scores="model",
    texts=None,
    ptx=0.0,
    decay=None,
    pad=0,
    defers=True,
    steps=None,
    recorded=False,
):
    """Iterations on given responses; what each step did, as numbers and CPU tensors.

    Args:
        base, actor, reward: directories.
        algorithm: of step 3.
        options: of PpoConfig, with ``temperature``.
        iterations: [responses, bonus to the score of each] of each.
        rows_per_step: responses of an optimizer step.
        micro: of a rank.
        rate: of both engines.
        max_grad_norm: of both.
        stage: of ZeRO.
        scores: where they come from besides the bonus: the reward ``model``, or ``nowhere``.
        texts: token lists to mix in.
        ptx: weight of them.
        decay: of the moving average.
        pad: the padding token.
        defers: take old outputs from the update where a run does, instead of a pass before.
        steps: lists of responses' numbers of each step, instead of those dealt.
        recorded: replay passes of training, within ``recordable()``.
    """
    options = dict(options)
    temperature = options.pop("temperature")
    ppo = PpoConfig(algorithm=algorithm, **options)
    config = config_of(
        actor={"lora_dim": 3, "lora_learning_rate": rate},
        critic={"lora_dim": 4, "lora_learning_rate": rate},
        ppo={"algorithm": algorithm},
    )
    accumulation = max(1, rows_per_step // (micro * world_size()))
    settings = engine_settings(
        stage=stage, micro=micro, accumulation=accumulation, max_grad_norm=max_grad_norm
    )
    meta = stage == 3 and rank() > 0
    roles = roles_of(config, actor, reward if scores == "model" or algorithm == "ppo" else None)
    if meta:
        roles = roles_of(config, actor, reward if roles.reward else None, meta=True)
    shard_model(roles.whole(), settings)
    networks = networks_of(roles, entropy_trains=ppo.entropy_coef > 0)
    made = {
        name: TrainEngine(
            network,
            parameter_groups(roles.models[name].model, config.roles[name].optim),
            settings,
        )
        for name, network in zip(("actor", "critic"), networks, strict=True)
        if network is not None
    }
    recorders = record(*(engine.module for engine in made.values())) if recorded else []
    scorer = None if scores != "model" else made.get("critic", made["actor"])
    engines = Engines(made["actor"], made.get("critic"), scorer, temperature)
    trained = {
        name: {n: p for n, p in m.model.named_parameters() if p.requires_grad}
        for name, m in roles.trained.items()
    }
    base_before = gather_to_cpu(_base(roles))
    average = None if decay is None else MovingAverage(roles.actor.model, decay)
    pretraining = None
    if texts is not None:
        loader = text_loader(
            texts, micro=micro, accumulation=accumulation, rank=rank(), world_size=world_size()
        )
        pretraining = Pretraining(loader, coefficient=ptx)
    reports = [
        _iteration(
            engines,
            ppo,
            *each,
            number,
            rows_per_step=rows_per_step,
            micro=micro,
            pretraining=pretraining,
            average=average,
            pad=pad,
            defers=defers,
            given=steps,
        )
        for number, each in enumerate(iterations)
    ]
    after = gather_to_cpu(_base(roles))
    report = {
        "iterations": reports,
        "trained": {name: gather_to_cpu(each) for name, each in trained.items()},
        "tapes": [len(each.tapes) for each in recorders],
        "average": {} if average is None else dict(average.tensors()),
        "base_changed": [n for n, v in base_before.items() if not torch.equal(v, after[n])],
    }
    for engine in made.values():
        release(engine)
    return report


def iterate_many(runs):
    """Several runs after another, as :func:`iterate`."""
    reports = []
    for arguments in runs:
        with recordable() if arguments.get("recorded") else nullcontext():
            reports.append(iterate(**arguments))
    return reports


def _base(roles):
    """What no role may change: the actor's base, and everything of reference and reward."""
    adapter = adapter_parameters(roles.actor.model)
    parameters = {n: p for n, p in roles.actor.model.named_parameters() if n not in adapter}
    for name in ("reference", "reward"):
        if name in roles.models:
            parameters |= {f"{name}.{n}": p for n, p in roles.models[name].model.named_parameters()}
    return parameters


def _iteration(
    engines,
    ppo,
    given_responses,
    bonus,
    number,
    *,
    rows_per_step,
    micro,
    pretraining,
    average,
    pad,
    defers,
    given,
):
    responses = [Response(tuple(p), tuple(t), True, g) for p, t, g in given_responses]
    place_of = {"rank": rank(), "world_size": world_size()}
    if given is None:
        steps = steps_of(
            given_responses,
            number,
            epochs=ppo.ppo_epochs,
            rows_per_step=rows_per_step,
            micro=micro,
            **place_of,
        )
    else:
        steps = [Minibatch(s, [s[rank() :: world_size()]]) for s in given] * ppo.ppo_epochs
    make = partial(collate, responses, pad_id=pad)
    first = steps[: len(steps) // ppo.ppo_epochs]
    batches = [make(rows) for step in first for rows in step.micro_batches]
    deferred = count_deferred(ppo, steps) if defers else 0
    bonus = torch.tensor([math.nan if b is None else b for b in bonus])
    if engines.reward is not None:
        model = RewardModelScorer(engines, lambda _: batches)
        bonus = bonus + model(responses, TrainerState()).total
    experience = make_experience(engines, responses, batches, Scores(bonus), deferred=deferred)
    scores = experience.scores
    updater = Updater(
        engines,
        ppo,
        experience,
        Steps(steps, make, batches, deferred),
        estimate_advantages=partial(
            advantages_and_returns,
            rewards=torch.where(scores.isnan(), 0, scores),
            config=ppo,
            kl_coef=ppo.kl_coef,
        ),
        kl_coef=ppo.kl_coef,
        entropy_coef=ppo.entropy_coef,
        pretraining=pretraining,
        max_length=LONGEST,
    )
    results = []
    for read in updater.queue_steps(factor_of):
        results.append(asdict(read()))
        if average is not None:
            average.update()
    experience = updater.experience
    targets = updater.targets
    return {
        "steps": results,
        "numbers": [step.numbers for step in steps],
        "advantages": targets.advantages,
        "returns": targets.returns,
        "kl": experience.kl(),
        "scores": scores,
        "values": experience.values,
        "logprobs": experience.logprobs,
        "reference": experience.ref_logprobs,
    }


def score_by_length(count):
    """Scores of a function that counts words, and the responses this rank asked it about."""
    asked = []

    def score(prompts, responses, log_extra, log_metric):
        lengths = [len(each.split()) for each in responses]
        asked.extend(lengths)
        log_extra("length", lengths)
        log_metric("calls", sum(lengths))
        return lengths

    responses = [Response((5,), (4,) * (n + 1), True, n) for n in range(count)]
    function = RewardFunction("reward_function", "mine:score", score, Words())
    scores = function(responses)[:, 0].tolist()
    return {"scores": scores, "own": asked, "logged": function.log.take(responses)}
