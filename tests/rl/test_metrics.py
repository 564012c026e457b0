"""Figures of an iteration that no other test works out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.algos.advantages import RunningMoments
from dschat_lora.data.loader import Window
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Experience
from dschat_lora.rl.learn.pretraining import Pretraining
from dschat_lora.rl.loop.parts import rollout_rows
from dschat_lora.rl.options.algorithms import ALGORITHMS, RolloutCorrection
from dschat_lora.rl.options.config import RewardsConfig, RolloutConfig
from dschat_lora.rl.options.engines import EngineFacts
from dschat_lora.rl.response.response import Origin, Response
from dschat_lora.rl.score.scores import shape
from dschat_lora.rl.watch.metrics import (
    check_sampler,
    importance_metrics,
    response_metrics,
    sampler_errors,
)
from dschat_lora.rl.watch.throughput import FlopCounter
from helpers.tiny import tiny_model


def scored(rows, mask, policy, scores=None):
    """An experience without values, in which the reference is the policy."""
    scores = torch.zeros(len(rows)) if scores is None else torch.tensor(scores)
    return Experience(rows, torch.tensor(mask), policy, scores, policy, None)


def test_sampler_error_is_over_the_tokens_that_count():
    drawn = [(-1.0, -2.0), (-3.0,), (-0.5, -0.5, -0.5)]
    responses = [Response((1,), (2,) * len(each), True, 0, logprobs=each) for each in drawn]
    # The last response has no score; padding holds anything.
    mask = [[True, True, False], [True, False, False], [False] * 3]
    trained_on = torch.tensor([[-1.25, -2.0, 9.0], [-2.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    metrics = sampler_errors(scored(responses, mask, trained_on, [1.0, 2.0, math.nan]))
    assert metrics["sampler_error"] == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert metrics["sampler_error_max"] == pytest.approx(1.0)


def test_an_engine_that_knows_no_log_probabilities_of_the_policy_has_no_error():
    nan = math.nan
    rows = [Response((1,), (2,) * 2, True, 0, logprobs=(nan, nan)), Response((1,), (2,), True, 0)]
    experience = scored(rows, [[True, True], [False, False]], torch.zeros(2, 2), [1.0, nan])
    assert sampler_errors(experience) == {}
    # Of a response that does not count they are nobody's matter.
    known = [replace(rows[0], logprobs=(-1.0, 0.0)), replace(rows[1], logprobs=(nan,))]
    metrics = sampler_errors(replace(experience, responses=known))
    assert metrics == {"sampler_error": 0.5, "sampler_error_max": 1.0}


def test_answers_of_the_data_have_no_error_of_a_sampler_and_weight_1():
    rows = [
        Response((1,), (2,), True, 0, logprobs=(-1.5,), sampler_logprobs=(-2.0,)),
        Response((1,), (2,), True, 1, origin=Origin(is_drawn=False)),
    ]
    experience = scored(rows, [[True], [True]], torch.full((2, 1), -1.0))
    assert sampler_errors(experience) == {"sampler_error": 0.5, "sampler_error_max": 0.5}
    weights = experience.importance(RolloutCorrection(cap=9.0))
    assert weights.flatten().tolist() == pytest.approx([math.e, 1.0])


def test_filters_make_no_token_less_probable():
    nan = math.nan
    drawn = ((-0.5, -3.0), (-0.25,))
    rows = [
        Response((1,), (2,) * len(d), True, 0, logprobs=(nan,) * len(d), sampler_logprobs=d)
        for d in drawn
    ]
    experience = scored(rows, [[True, True], [True, False]], torch.full((2, 2), -1.0))
    assert sampler_errors(experience) == {}
    metrics = sampler_errors(experience, bounds=True)
    assert metrics == {"sampler_error": pytest.approx(2 / 3), "sampler_error_max": 2.0}


def test_importance_weights_are_told_of_the_tokens_that_count():
    drawn = [(math.log(0.5), math.log(0.8)), (math.log(0.25),), (math.log(0.9),)]
    responses = [Response((1,), (2,) * len(d), True, 0, sampler_logprobs=d) for d in drawn]
    mask = [[True, True], [True, False], [False, False]]
    policy = torch.tensor([[0.25, 0.8], [1.0, 0.3], [0.1, 0.1]]).log()
    experience = scored(responses, mask, policy, [1.0, 2.0, math.nan])
    # ratios 1/2, 1 and 4, the last one cut to 2, or left out; k3 is r - 1 - log r
    tis, mis = RolloutCorrection(2.0), RolloutCorrection(2.0, masks=True)
    metrics = importance_metrics(experience.importance(tis), experience, tis)
    assert metrics["importance_weight"] == pytest.approx((0.5 + 1 + 2) / 3)
    assert metrics["importance_capped"] == pytest.approx(1 / 3)
    assert metrics["rollout_ratio_max"] == pytest.approx(4)
    assert metrics["rollout_kl"] == pytest.approx((-0.5 + 3 + math.log(0.5)) / 3, rel=1e-5)
    masked = importance_metrics(experience.importance(mis), experience, mis)
    assert masked["importance_weight"] == pytest.approx((0.5 + 1) / 3)
    assert masked["importance_masked"] == pytest.approx(1 / 3)
    assert "importance_capped" not in masked
    assert importance_metrics(None, experience, None).keys() == {"rollout_kl", "rollout_ratio_max"}


def test_responses_are_kept_with_the_numbers_of_each_of_the_actors_tokens():
    nan, actors = math.nan, (True, False, True)
    responses = [
        Response((1,), (2, 3), True, 0),
        Response((1,), (4, 5, 6), False, 1, actor_mask=actors),
        Response((1,), (7,), True, 2),
    ]
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    policy = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [0.0, 0.0]])
    reference = torch.tensor([[-1.5, -2.0], [-2.0, -4.5], [0.0, 0.0]])
    values = torch.tensor([[0.25, 0.5], [0.75, 1.0], [0.0, 0.0]])
    scores = torch.tensor([1.0, 2.0, nan])
    targets = AdvantagesAndReturns(torch.tensor([[1.0, -1.0], [2.0, -4.0], [0.0, 0.0]]), None)
    experience = Experience(responses, mask, reference, scores, policy, values)

    def decode(ids, **_):
        return " ".join(map(str, ids))

    rows = rollout_rows(experience, targets, decode, iteration=3, most=8)
    assert [row["response"] for row in rows] == ["2 3", "4 5 6", "7"]
    assert [row["reward"] for row in rows] == [1.0, 2.0, None]
    assert [row["advantage"] for row in rows] == [0.0, -1.0, None]
    assert [row["kl"] for row in rows] == [0.5, -0.5, None]
    by_token = [{k: v for k, v in row.items() if k.startswith("token")} for row in rows]
    assert by_token == [
        {
            "tokens": ["2", "3"],
            "token_advantage": [1.0, -1.0],
            "token_kl": [0.5, 0.0],
            "token_value": [0.25, 0.5],
        },
        {
            "tokens": ["4", "6"],
            "token_advantage": [2.0, -4.0],
            "token_kl": [-1.0, 0.5],
            "token_value": [0.75, 1.0],
        },
        {},
    ]
    assert len(rollout_rows(experience, targets, decode, iteration=3, most=1)) == 1
    logged = replace(experience, logged_columns={"golden": ["a", "b", "c"]})
    extra = [row["extra"] for row in rollout_rows(logged, targets, decode, iteration=3, most=2)]
    assert extra == [{"golden": "a"}, {"golden": "b"}]
    assert rollout_rows(experience, None, decode, iteration=3, most=1)[0]["advantage"] is None


def test_drawing_computes_each_token_once_but_the_last_and_reads_weights_once_a_step():
    """By hand, in a model of 2 layers that are 32 wide, whose keys are half as wide."""
    model = tiny_model("llama", vocab_size=61, tie_word_embeddings=False)
    counter = FlopCounter(
        {"actor": SimpleNamespace(model=model)}, checkpointed={}, num_generations=1, batch_size=2
    )
    responses = [Response((1,) * 3, (2,) * 4, True, 0), Response((1,) * 5, (2,) * 2, True, 1)]
    work = counter(responses, passes=1, shares_before={}, counts=StepCounts(), skips_padding=True)
    linears = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    fed, pairs, drawn = 6 + 6, 21 + 21, 4 + 2  # positions, pairs of (query, key), logits
    expected = 2 * linears * fed + 2 * 4 * 32 * pairs + 2 * 32 * 61 * drawn
    assert work.flops["generation"].model == expected
    cached = (3 * 4 + 10) + (5 * 2 + 3)  # of the prompt, and of what was drawn before
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert work.decode_bytes == 4 * weights + cached * 2 * 2 * 16 * 4


def test_metrics_of_responses_are_means_over_those_that_count():
    responses = [
        Response((1,), (2, 3), True, 0),
        Response((1,), (4,), False, 0),
        Response((1,), (7,), True, 1),
    ]
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    policy = torch.tensor([[0.5, 0.25], [0.5, 1.0], [1.0, 1.0]]).log()
    reference = torch.tensor([[0.25, 0.5], [0.125, 1.0], [1.0, 1.0]]).log()
    scores, taught = torch.tensor([1.0, 4.0, math.nan]), torch.tensor([-1.0, 2.0, 0.0])
    values = torch.tensor([[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]])
    targets = AdvantagesAndReturns(values, torch.tensor([[1.0, 3.0], [5.0, 0.0], [0.0, 0.0]]))
    experience = Experience(responses, mask, reference, scores, policy, values)
    metrics = response_metrics(experience, taught, targets, ALGORITHMS["ppo"])
    # log p/q is log 2 - log 2 in all of the first response, and log 4 of the second
    assert metrics["kl"] == pytest.approx(math.log(4) / 2, rel=1e-6)
    assert metrics["kl_standard_error"] == pytest.approx(math.log(4) / 2 / math.sqrt(2), rel=1e-6)
    # k3 is r - 1 - log r of r = q/p: 1/2 and 2, and 1/4
    assert metrics["kl_k3"] == pytest.approx((0.5 + (-0.75 + math.log(4))) / 2, rel=1e-6)
    assert (metrics["reward"], metrics["reward_std"], metrics["scaled_reward"]) == (2.5, 1.5, 0.5)
    assert metrics["response_length"] == 1.5
    assert metrics["reward_length_correlation"] == pytest.approx(-1)
    assert (metrics["eos_rate"], metrics["truncated_fraction"], metrics["dropped"]) == (0.5, 0.5, 1)
    # errors 0, 0, 3 have the variance 2, the returns 1, 3, 5 that of 8/3
    assert metrics["explained_variance"] == pytest.approx(1 - 2 / (8 / 3), rel=1e-6)
    assert (metrics["equal_prompts"], metrics["prompts"]) == (1, 2)
    assert (metrics["samples"], metrics["tokens"], metrics["supervised_tokens"]) == (3, 7, 4)


def test_clipped_scores_are_told_whatever_the_penalty():
    config = RewardsConfig(clip_reward_value=2.0, missing_eos_penalty=1.0)
    scores, ended = torch.tensor([2.0, 3.0, -9.0, 1.0]), torch.tensor([True, False, True, True])
    options = ended, [1] * 4, RunningMoments()
    metrics = shape(scores, *options, replace(config, reward_scaling="none"), longest=9)
    assert metrics.rewards.tolist() == [2.0, 1.0, -2.0, 1.0]
    assert metrics.clip_fraction == 0.75
    free = RewardsConfig(clip_reward_value=0.0, reward_scaling="none")
    assert shape(99 * scores, *options, free, longest=9).clip_fraction == 0.0


class Texts:
    """A loader of two steps an epoch, whose batches are counts alone."""

    steps_per_epoch = 2
    state = dict

    class Batch:
        def __init__(self, size):
            self.num_samples, self.num_tokens, self.num_targets = 1, size, size - 1
            self.num_attended, self.input_ids = size, torch.zeros(1, size)

    def steps(self, start):
        sizes = [[3, 5], [7], [3, 5]][start:]
        return iter([Window([self.Batch(n) for n in each], self.counts(each)) for each in sizes])

    def counts(self, sizes):
        tokens, samples = sum(sizes), len(sizes)
        return {"num_samples": samples, "num_tokens": tokens, "num_targets": tokens - samples}


def test_text_is_counted_once_since_the_last_look(ranks):
    counts = ranks(1).run("test_metrics:counted")[0]
    assert counts == [[8, 15], 3 + 5 + 7 + 3 + 5, 0]


def counted():
    """On a rank: targets' tokens of windows, and what was counted."""
    texts = Pretraining(Texts(), coefficient=1.0)
    first, second = texts.window(), texts.window()
    texts.window()
    tokens = [sum(b.num_tokens for b in first.batches)]
    tokens.append(tokens[0] + sum(b.num_tokens for b in second.batches))
    return [tokens, texts.take_counts().num_tokens, texts.take_counts().num_tokens]


@pytest.mark.parametrize(
    ("dtype", "rounding", "wrong"), [("fp32", 4e-4, 6e-4), ("bf16", 0.2, 0.3), ("fp16", 0.09, 0.11)]
)
def test_a_sampler_that_no_rounding_explains_stops_the_run(dtype, rounding, wrong):
    check_sampler({"sampler_error": rounding}, dtype, RolloutConfig())
    check_sampler({}, dtype, RolloutConfig())
    with pytest.raises(
        ValueError, match=rf"are {wrong:g} nats per token .* rounding in {dtype} does not explain"
    ):
        check_sampler({"sampler_error": wrong}, dtype, RolloutConfig())


def test_an_engine_of_another_model_stops_the_run():
    engine = EngineFacts(in_process=False, same_model=True)
    elsewhere = SimpleNamespace(rollout_engine="http://a", engine=engine)
    check_sampler({"sampler_error": 0.4}, "fp32", elsewhere)
    with pytest.raises(
        ValueError, match="--rollout_engine http://a samples from a different model"
    ):
        check_sampler({"sampler_error": 0.6}, "fp32", elsewhere)
    with pytest.raises(ValueError, match="decoded or trained correctly, so"):
        check_sampler({"sampler_error": 0.4}, "fp32", RolloutConfig())
