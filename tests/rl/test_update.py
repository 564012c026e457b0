"""What the update feeds to its engines, and when; without any engine."""

import math
from dataclasses import replace

import pytest
import torch

from dschat_lora.engine.build import StepOutcome
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Steps, count_deferred
from dschat_lora.rl.learn.pretraining import Pretraining
from dschat_lora.rl.learn.update import StepResult, Updater
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import Minibatch, collate
from dschat_lora.rl.watch.metrics import update_metrics
from helpers.given_engines import MASK, RESPONSES, Roles, experience, tokens_of
from helpers.iterations import ragged_texts, text_loader

pytestmark = pytest.mark.usefixtures("one_rank")


def advantages(known, by=1.0):
    return AdvantagesAndReturns(by * known.mask, (0.5 + by) * known.mask)


def updated(
    roles, known, steps, *, find=advantages, config=None, deferred=0, from_sampler=False, **options
):
    config = config or PpoConfig()
    updater = Updater(
        roles,
        config,
        known,
        Steps(
            steps,
            lambda rows: collate(RESPONSES, rows, 0),
            deferred=deferred,
            from_sampler=from_sampler,
        ),
        estimate_advantages=find,
        kl_coef=0.3,
        entropy_coef=config.entropy_coef,
        **options,
    )
    results = (read() for read in updater.queue_steps(lambda index: 10.0 + index))
    return [(updater.experience, result) for result in results], updater


TWO_HALVES = [Minibatch([0, 1, 2], [[0, 1], [2]]), Minibatch([3, 4, 5], [[3], [5, 4]])]


def test_each_micro_batch_gives_its_share_and_the_last_ends_the_step():
    roles = Roles()
    results, _ = updated(roles, experience(), TWO_HALVES)
    shares = [(0, 1), (2,), (3,), (5, 4)]
    totals = [tokens_of(0, 1, 2)] * 2 + [tokens_of(3, 4, 5)] * 2
    # ratio 1 and advantage 1; the value is 1 below the return
    assert roles.actor.fed == [
        (pytest.approx(-tokens_of(*own) / total), last)
        for own, total, last in zip(shares, totals, (False, True) * 2, strict=True)
    ]
    assert roles.critic.fed == [
        (pytest.approx(0.5 * tokens_of(*own) / total), last)
        for own, total, last in zip(shares, totals, (False, True) * 2, strict=True)
    ]
    assert roles.factors == [10.0, 11.0]
    assert roles.modes == ["train actor critic"] * 2
    for _, result in results:
        assert result.policy_loss == pytest.approx(-1.0)
        assert result.value_loss == pytest.approx(0.5)
        assert result.entropy == pytest.approx(0.25)
        assert (result.clip_fraction, result.approx_kl, result.text_loss) == (0.0, 0.0, None)


def test_text_ends_the_actors_step_and_the_critic_ends_its_own():
    roles, texts = Roles(text=2.0), ragged_texts(3)
    pretraining = Pretraining(text_loader(texts, micro=1, accumulation=3), coefficient=0.7)
    results, _ = updated(roles, experience(), TWO_HALVES[:1], pretraining=pretraining)
    assert [last for _, last in roles.actor.fed] == [False] * 4 + [True]
    assert [last for _, last in roles.critic.fed] == [False, True]
    sizes = sorted((len(ids) - 1 for ids in texts), reverse=True)
    assert [loss for loss, _ in roles.actor.fed[2:]] == pytest.approx(
        [0.7 * 2.0 * n / sum(sizes) for n in sizes]
    )
    assert results[0][1].text_loss == pytest.approx(2.0)
    assert results[0][1].policy_loss == pytest.approx(-1.0)


def test_while_the_critic_warms_up_it_alone_learns_from_the_same_targets():
    roles, both, texts = Roles(), Roles(), ragged_texts(3)
    pretraining = Pretraining(text_loader(texts, micro=1, accumulation=3), coefficient=0.7)
    results, _ = updated(
        roles, experience(), TWO_HALVES, pretraining=pretraining, learning=("critic",)
    )
    expected, _ = updated(both, experience(), TWO_HALVES)
    assert roles.modes == ["train critic"] * 2
    assert roles.actor.fed == []
    assert roles.critic.fed == both.critic.fed
    assert pretraining.state() == {"step": 0}
    for (_, result), (_, other) in zip(results, expected, strict=True):
        assert result.outcomes.keys() == {"critic"}
        assert (result.value_loss, result.policy_loss) == (other.value_loss, other.policy_loss)
        assert result.text_loss is None
    assert update_metrics([result for _, result in results])["grad_norm"] is None


def test_a_step_in_which_nothing_counts_is_passed_over_with_its_rate_and_text():
    roles, texts = Roles(), ragged_texts(2)
    pretraining = Pretraining(text_loader(texts, micro=1, accumulation=1), coefficient=1.0)
    known = experience(unscored=(0, 1, 2))
    results, _ = updated(roles, known, TWO_HALVES, pretraining=pretraining)
    assert len(results) == 1
    assert results[0][1].num_tokens == tokens_of(3, 4, 5)
    assert roles.factors == [11.0]
    assert roles.passes == [(3,), (5, 4)]
    assert pretraining.state() == {"step": 1}


def test_the_first_step_taken_compares_the_passes_and_no_later_one():
    (_, first), (_, second) = updated(Roles(logprob=-0.9), experience(), TWO_HALVES)[0]
    assert first.ratio_error == pytest.approx(math.exp(0.1) - 1)
    assert second.ratio_error is None
    known = experience(unscored=(0, 1, 2))
    ((_, only),) = updated(Roles(logprob=-0.9), known, TWO_HALVES)[0]
    assert only.ratio_error == pytest.approx(math.exp(0.1) - 1)


def test_largest_error_is_that_of_any_micro_batch_and_rank(monkeypatch):
    class Unlike(Roles):
        def policy(self, batch, width):
            self.logprob = -0.8 if 0 in batch.numbers else -1.0
            return super().policy(batch, width)

    ((_, result), _) = updated(Unlike(), experience(), TWO_HALVES)[0]
    assert result.ratio_error == pytest.approx(math.exp(0.2) - 1)
    monkeypatch.setattr("dschat_lora.rl.learn.update.max_tensor_", lambda own: own.clamp(min=0.75))
    ((_, result), _) = updated(Roles(), experience(), TWO_HALVES)[0]
    assert result.ratio_error == 0.75


def test_what_is_not_known_is_what_the_first_pass_says():
    roles = Roles(logprob=-0.7, value=0.2)
    whole = Minibatch(list(range(6)), [[4, 2, 0, 1, 3, 5]])
    ((known, result),), updater = updated(roles, experience(known=False), [whole])
    torch.testing.assert_close(known.logprobs, -0.7 * MASK)
    torch.testing.assert_close(known.values, 0.2 * MASK)
    assert not known.logprobs.requires_grad
    assert result.ratio_error == 0.0
    assert updater.targets is not None
    assert roles.passes == [(4, 2, 0, 1, 3, 5)]


GRPO = PpoConfig(algorithm="grpo", kl_coef=0.0)


def half_known():
    known = experience(critic=False)
    known.logprobs[:3] = math.nan
    return known


def test_old_logprobs_that_are_not_known_are_those_of_the_first_steps_passes():
    roles = Roles(critic=False, logprob=-0.7)
    results, updater = updated(roles, half_known(), TWO_HALVES, config=GRPO, deferred=True)
    logprobs = torch.tensor([-0.7] * 3 + [-1.0] * 3)[:, None] * MASK
    torch.testing.assert_close(updater.experience.logprobs, logprobs)
    assert not updater.experience.logprobs.requires_grad
    assert [result.ratio_error for _, result in results] == [0.0, None]
    assert results[1][1].approx_kl == pytest.approx(math.exp(0.3) - 1.3)
    assert roles.passes == [(0, 1), (2,), (3,), (5, 4)]


def test_old_logprobs_of_a_steps_own_passes_have_no_gradient():
    class Learning(Roles):
        def policy(self, batch, width, role="actor"):
            self.leaf, entropy = super().policy(batch, width, role)
            return self.leaf, entropy

    roles, gradients = Learning(critic=False), []

    def backward(loss, *, last):
        loss.backward()
        gradients.append(roles.leaf.grad)

    roles.actor.backward = backward
    known = replace(half_known(), ref_logprobs=-1.0 * MASK)  # where the divergence is flat
    updated(roles, known, TWO_HALVES[:1], config=GRPO, deferred=True)
    for rows, slope in zip(([0, 1], [2]), gradients, strict=True):
        expected = -1.0 * MASK[rows] / tokens_of(0, 1, 2)  # of -exp(logprob - old) at ratio 1
        torch.testing.assert_close(slope, expected)


def test_a_first_step_that_is_passed_over_gives_its_old_logprobs_all_the_same():
    roles, known = Roles(critic=False, logprob=-0.7), half_known()
    known = replace(known, responses=[replace(r, ended=n > 2) for n, r in enumerate(RESPONSES)])
    config = replace(GRPO, mask_truncated_completions=True)
    ((_, result),), updater = updated(roles, known, TWO_HALVES, config=config, deferred=True)
    torch.testing.assert_close(updater.experience.logprobs[:3], -0.7 * MASK[:3])
    assert result.ratio_error == pytest.approx(math.exp(0.3) - 1)
    assert roles.modes == ["eval", "train actor"]


def test_the_decode_loops_logprobs_are_compared_with_the_first_steps_passes():
    roles, known = Roles(logprob=-0.7), experience()
    results, updater = updated(roles, known, TWO_HALVES, from_sampler=True)
    assert torch.equal(updater.experience.logprobs, known.logprobs)
    torch.testing.assert_close(updater.computed.logprobs[:3], -0.7 * MASK[:3])
    assert torch.equal(updater.computed.mask, MASK & (torch.arange(6) < 3)[:, None])
    assert results[0][1].ratio_error == pytest.approx(math.exp(0.3) - 1)


@pytest.mark.parametrize(
    ("options", "steps", "batches"),
    [
        ({"algorithm": "grpo"}, TWO_HALVES, 2),
        ({"algorithm": "grpo"}, TWO_HALVES[:1], 2),
        ({"algorithm": "grpo", "kl_in": "reward"}, TWO_HALVES, 0),
        ({"algorithm": "grpo", "importance_cap": 2.0}, TWO_HALVES, 0),
        ({"algorithm": "grpo", "use_rollout_logprobs": True}, TWO_HALVES, 0),
        ({"algorithm": "rloo"}, TWO_HALVES, 0),
        ({"algorithm": "ppo"}, TWO_HALVES, 0),
        ({"algorithm": "reinforce_pp"}, TWO_HALVES, 0),
        ({"algorithm": "ppo"}, [Minibatch([0, 1], [[0, 1]])], 1),
        ({"algorithm": "ppo"}, [Minibatch([0, 1], [[0, 1]])] * 2, 0),
        ({"algorithm": "grpo", "use_rollout_logprobs": True}, [Minibatch([0], [[0]])], 1),
    ],
)
def test_old_outputs_are_left_to_the_update_where_its_first_loss_does_not_need_them(
    options, steps, batches
):
    assert count_deferred(PpoConfig(**options), steps) == batches


def test_targets_are_found_once_an_iteration():
    calls = []

    def find(known):
        calls.append(known)
        return advantages(known)

    updated(Roles(), experience(), TWO_HALVES * 2, find=find)
    assert len(calls) == 1


def test_values_are_in_units_of_rewards_before_they_are_compared():
    roles = Roles(value=3.0)
    known = experience()
    units = {"rescale_values": lambda values: (values - 2.0 * (values != 0)) / 2.0}
    ((_, result),) = updated(roles, known, TWO_HALVES[:1], **units)[0]
    # (3 - 2) / 2 = 0.5, and the return is 1.5
    assert result.value_loss == pytest.approx(0.5)


def test_an_infinite_loss_of_one_role_breaks_both_at_the_last_micro_batch():
    def find(known):
        targets = advantages(known)
        targets.returns[2, 0] = math.inf
        return targets

    roles = Roles()
    updated(roles, experience(), TWO_HALVES[:1], find=find)
    assert math.isfinite(roles.actor.fed[0][0])
    assert math.isnan(roles.actor.fed[1][0])
    assert math.isnan(roles.critic.fed[1][0])


def test_without_a_critic_there_is_nothing_of_its_own():
    roles = Roles(critic=False)
    ((_, result), _) = updated(roles, experience(critic=False), TWO_HALVES)[0]
    assert result.value_loss is None
    assert result.value_clip_fraction is None
    assert result.outcomes.keys() == {"actor"}


def test_grpo_takes_the_divergence_into_the_loss_and_not_into_the_policys_part():
    known = experience(critic=False)
    known = replace(known, ref_logprobs=-1.5 * MASK)
    config = PpoConfig(algorithm="grpo", entropy_coef=0.1)
    ((_, result), _) = updated(Roles(critic=False), known, TWO_HALVES, config=config)[0]
    divergence = math.exp(-0.5) + 0.5 - 1
    assert result.loss == pytest.approx(-1.0 + 0.3 * divergence - 0.1 * 0.25)
    assert result.policy_loss == pytest.approx(-1.0 - 0.1 * 0.25)
    figures = update_metrics([result])
    assert (figures["loss"], figures["policy_loss"]) == (result.loss, result.policy_loss)


def test_a_step_is_skipped_if_either_role_is():
    names = ("loss", "policy_loss", "entropy", "clip_fraction", "approx_kl", "num_tokens")
    absent = dict.fromkeys(("value_loss", "text_loss", "value_clip_fraction", "ratio_error"))
    figures = {**dict.fromkeys(names, 0.0), **absent, "learning_rates": {}}
    for actor, critic in ((False, False), (True, False), (False, True)):
        own = {"actor": StepOutcome(1.0, actor, 1.0), "critic": StepOutcome(1.0, critic, 1.0)}
        assert StepResult(**figures, outcomes=own).skipped is (actor or critic)


def test_a_response_without_score_is_in_no_figure_of_a_batch_it_shares():
    class Loud(Roles):
        def policy(self, batch, width):
            logprobs, entropies = super().policy(batch, width)
            silent = torch.tensor([[float(n != 1)] for n in batch.numbers])
            return logprobs - (1 - silent), entropies + 100 * (1 - silent)

    known = replace(experience(unscored=(1,), critic=False), ref_logprobs=-1.5 * MASK)
    config = PpoConfig(algorithm="grpo", entropy_coef=0.1)
    ((_, result),) = updated(Loud(critic=False), known, TWO_HALVES[:1], config=config)[0]
    assert result.num_tokens == tokens_of(0, 2)
    assert result.entropy == pytest.approx(0.25)
    divergence = math.exp(-0.5) + 0.5 - 1
    assert result.loss == pytest.approx(-1.0 + 0.3 * divergence - 0.1 * 0.25)


@pytest.mark.parametrize(
    ("policy", "value", "clipped"), [(0.1, 0.9, (1.0, 0.0)), (0.9, 0.1, (0.0, 1.0))]
)
def test_each_role_has_its_own_clip(policy, value, clipped):
    # the ratio is 1.35 where more still pays; the value has gone from 0.5 to 0.8 of 1.5
    config = PpoConfig(cliprange=policy, cliprange_value=value)
    roles = Roles(logprob=-0.7, value=0.8)
    ((_, result),) = updated(roles, experience(), TWO_HALVES[:1], config=config)[0]
    assert (result.clip_fraction, result.value_clip_fraction) == clipped
    ratio = math.exp(0.3)
    assert result.policy_loss == pytest.approx(-1.1 if clipped[0] else -ratio)
    assert result.value_loss == pytest.approx(0.5 * (0.9 if clipped[1] else 0.7) ** 2)
    assert result.approx_kl == pytest.approx(ratio - 1 - 0.3)


def test_figures_are_means_over_tokens_whatever_divides_the_loss():
    config = PpoConfig(algorithm="grpo", loss_normalization="sequence", cliprange=0.1)
    roles = Roles(critic=False, logprob=-0.7)
    ((_, result),) = updated(roles, experience(critic=False), TWO_HALVES[:1], config=config)[0]
    assert (result.entropy, result.clip_fraction) == (pytest.approx(0.25), 1.0)
    assert result.approx_kl == pytest.approx(math.exp(0.3) - 1 - 0.3)
    assert result.policy_loss == pytest.approx(-1.1)


def test_batches_that_are_there_serve_the_first_pass_in_their_order():
    roles, numbers = Roles(), [[0, 1], [2], [3], [5, 4]]
    made = []

    def make(rows):
        made.append(rows)
        return collate(RESPONSES, rows, 0)

    first = [collate(RESPONSES, rows, 0) for rows in numbers]
    steps = Steps(TWO_HALVES * 2, make, first)
    options = {"estimate_advantages": advantages, "kl_coef": 0.0}
    updater = Updater(roles, PpoConfig(), experience(), steps, **options)
    for read in updater.queue_steps(lambda index: 1.0):
        read()
    assert roles.passes == [tuple(rows) for rows in numbers] * 2
    assert made == numbers


@pytest.mark.parametrize("both", [True, False])
def test_what_is_done_to_the_engines_is_done_to_both(both):
    class Noting:
        def __init__(self):
            self.noted = []

        def __getattr__(self, name):
            done = f"{name} done"
            result = (lambda: done) if name == "queue_step" else done
            return lambda *values: self.noted.append((name, *values)) or result

    actor, critic = Noting(), Noting() if both else None
    engines = Engines(actor, critic, None, 1.0)
    names = ["actor", "critic"] if both else ["actor"]
    assert engines.set_rates(0.5) == dict.fromkeys(names, "set_rates done")
    engines.eval()
    engines.train(names)
    assert engines.queue_step(names)() == dict.fromkeys(names, "queue_step done")
    for each in (actor, critic) if both else (actor,):
        assert each.noted == [("set_rates", 0.5), ("eval",), ("train",), ("queue_step",)]
    engines.train(["critic"])
    assert engines.queue_step(["critic"])() == ({"critic": "queue_step done"} if both else {})
    assert actor.noted[4:] == [("eval",)]


# ---------------------------------------------------------------------------- text


def windows_of(pretraining, count):
    return [
        [batch.input_ids.tolist() for batch in pretraining.window().batches] for _ in range(count)
    ]


def test_text_goes_on_epoch_after_epoch_and_from_where_it_was():
    def fresh():
        return Pretraining(text_loader(ragged_texts(5), micro=1, accumulation=2), coefficient=1.0)

    expected = windows_of(fresh(), 8)
    epoch = [sorted(str(b) for w in expected[n : n + 3] for b in w) for n in (0, 3)]
    assert epoch[0] == epoch[1]
    assert expected[:3] != expected[3:6]
    for stop in range(8):
        first = fresh()
        windows = windows_of(first, stop)
        resumed = fresh()
        resumed.read(2)
        resumed.window()
        resumed.restore(first.state())
        assert windows + windows_of(resumed, 8 - stop) == expected
