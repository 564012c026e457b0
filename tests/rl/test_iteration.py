"""Iterations of PPO, RLOO and GRPO against a plain loop over four separate stock models."""

import math
from functools import cache

import pytest
import torch

from helpers.iterations import factor_of, ragged_responses, ragged_texts, steps_of, text_loader
from helpers.plain_ppo import PlainRun
from helpers.roles import save_adapters
from helpers.spread import ALL

pytestmark = [pytest.mark.stage, pytest.mark.filterwarnings("ignore::UserWarning")]

# Every option away from where it would have no effect.
OPTIONS = {
    "ppo_epochs": 2,
    "kl_coef": 0.2,
    "gamma": 0.97,
    "lam": 0.9,
    "cliprange": 0.1,
    "cliprange_value": 0.15,
    "whiten_advantages": True,
    "entropy_coef": 0.0,
    "temperature": 1.0,
}
RATE = 5e-3


def bonus(count, *, seed, unscored=()):
    """What a function adds to each score; None: the response is not to count."""
    generator = torch.Generator().manual_seed(seed)
    values = (2 * torch.randn(count, generator=generator)).tolist()
    return [None if n in unscored else value for n, value in enumerate(values)]


def rounds(count, *, size=8, group_size=1, unscored=()):
    return [
        [
            ragged_responses(size, group_size=group_size, seed=10 + number),
            bonus(size, seed=number, unscored=unscored),
        ]
        for number in range(count)
    ]


BASE_RUN = {"algorithm": "ppo", "rows_per_step": 4, "micro": 4, "rate": RATE}
# name: (architecture, run)
CASES = {
    "ppo": ("opt", {"iterations": rounds(2, unscored=(3,)), "options": OPTIONS}),
    "ppo without whitening": (
        "llama",
        {
            "iterations": rounds(1),
            "options": OPTIONS | {"whiten_advantages": False, "temperature": 0.7},
        },
    ),
    "entropy, text and average": (
        "llama",
        {
            "iterations": rounds(2, size=7),
            "options": OPTIONS | {"entropy_coef": 0.05, "temperature": 0.8},
            "texts": ragged_texts(9),
            "ptx": 0.7,
            "decay": 0.8,
            "max_grad_norm": 0.5,
        },
    ),
    "rloo": (
        "opt",
        {
            "algorithm": "rloo",
            "iterations": rounds(2, size=9, group_size=3, unscored=(1, 6, 8)),
            "options": OPTIONS,
        },
    ),
    "grpo": (
        "llama",
        {
            "algorithm": "grpo",
            "iterations": rounds(2, size=9, group_size=3, unscored=(1, 6, 8)),
            "options": OPTIONS,
        },
    ),
    **{
        name: (
            "opt",
            {
                "algorithm": name,
                "iterations": rounds(1, size=9, group_size=size, unscored=(1, 6, 8)),
                "options": OPTIONS | clips,
            },
        )
        for name, size, clips in (
            ("gspo", 3, {"cliprange_low": 0.02, "cliprange_high": 0.03}),
            ("reinforce_pp", 1, {}),
            *((name, 3, {"cliprange_high": 0.15}) for name in ("dr_grpo", "dapo", "cispo")),
        )
        * ALL
    },
    "one step": (
        "llama",
        {
            "iterations": rounds(2, size=5, unscored=(2,)),
            "options": OPTIONS | {"ppo_epochs": 1, "entropy_coef": 0.01},
            "rows_per_step": 8,
            "micro": 8,
        },
    ),
}
ONE_PASS = "one step"
FIGURES = ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "value_clip_fraction")


@pytest.fixture(scope="module")
def family(model_directory, tmp_path_factory):
    """``family(kind)``: directories of base, actor and reward model."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def of(kind):
        base = model_directory(kind)
        return [base, *save_adapters(kind, base, root / kind)]

    return of


def run_of(name, family):
    kind, run = CASES[name]
    base, actor, reward = family(kind)
    return {"base": base, "actor": actor, "reward": reward, **BASE_RUN, **run}


@pytest.fixture(scope="module")
def plainly(family):
    """``plainly(name)``: what the plain loop finds."""

    @cache
    def of(name):
        run = run_of(name, family)
        plain = PlainRun(
            *(run[n] for n in ("base", "actor", "reward")),
            algorithm=run["algorithm"],
            options=run["options"],
            rate=run["rate"],
            max_grad_norm=run.get("max_grad_norm", 1.0),
            ptx=run.get("ptx", 0.0),
        )
        texts = text_windows(run) if "texts" in run else None
        iterations = []
        for number, (responses, more) in enumerate(run["iterations"]):
            seen = plain.look(responses, [math.nan if b is None else b for b in more])
            plain.find_targets(seen)
            steps = steps_of(
                responses,
                number,
                epochs=run["options"]["ppo_epochs"],
                rows_per_step=run["rows_per_step"],
                micro=run["micro"],
            )
            results = [
                plain.step(
                    *(responses, seen, step.numbers, texts),
                    decay=run.get("decay"),
                    factor=factor_of(index),
                )
                for index, step in enumerate(steps)
            ]
            results = [result for result in results if result is not None]
            iterations.append(
                {"steps": results, "seen": seen, "numbers": [s.numbers for s in steps]}
            )
        return {
            "iterations": iterations,
            "trained": {
                role: {n: p.detach() for n, p in plain.trained(role).items()}
                for role in plain.learners
            },
            "average": plain.averages,
        }

    return of


def text_windows(run):
    """The texts of each step, epoch after epoch."""
    loader = text_loader(run["texts"], micro=run["rows_per_step"], accumulation=1)
    for epoch in range(10**6):
        for (batch,) in loader.epoch(epoch):
            sizes = (batch.segment_ids > 0).sum(1).tolist()
            yield [ids[:n].tolist() for ids, n in zip(batch.input_ids, sizes, strict=True)]


@pytest.fixture(scope="module")
def reports_of(ranks, family):
    """``reports_of(name, *changes, size=1)``: rank 0's report of each run that is so changed."""

    def of(name, *changes, size=1):
        runs = [run_of(name, family) | each for each in changes]
        return ranks(size).run("helpers.iterations:iterate_many", runs=runs)[0]

    return of


@pytest.fixture(scope="module")
def usual(reports_of):
    """``usual(name)``: the report on one process."""
    return cache(lambda name: reports_of(name, {})[0])


def in_peft(name):
    if name == "score.trained.weight":
        return "base_model.model.score.modules_to_save.default.weight"
    return f"base_model.model.{name}.default.weight"


def assert_same_run(report, expected):
    for ours, theirs in zip(report["iterations"], expected["iterations"], strict=True):
        assert_same_tables(ours, theirs)
        assert ours["numbers"] == theirs["numbers"]
        for step, (mine, wanted) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
            assert_same_step(mine, wanted, first=step == 0)
    assert report["trained"].keys() == expected["trained"].keys()
    for role, weights in report["trained"].items():
        assert_same_weights(weights, expected["trained"][role])
    assert report["base_changed"] == []


def assert_same_tables(ours, theirs):
    """Tables over the responses that count."""
    names = {"kl": "kl", "advantages": "advantages", "logprobs": "old", "reference": "reference"}
    if ours["returns"] is not None:
        names |= {"returns": "returns", "values": "values"}
    for row, seen in enumerate(theirs["seen"]):
        if math.isnan(seen["score"]):
            assert ours["scores"][row].isnan()
            assert ours["advantages"][row].abs().sum() == 0
            continue
        assert float(ours["scores"][row]) == pytest.approx(seen["score"], abs=1e-5)
        for mine, wanted in names.items():
            value = ours[mine][row]
            size = len(seen["old"])
            assert value[:size].tolist() == pytest.approx(seen[wanted], abs=1e-5), mine
            if mine in ("kl", "advantages", "returns"):
                assert value[size:].abs().sum() == 0


def assert_same_step(mine, wanted, *, first):
    for name in FIGURES:
        if name.startswith("value") and mine["value_loss"] is None:
            assert "critic_norm" not in wanted
            continue
        assert mine[name] == pytest.approx(wanted[name], abs=1e-5), name
    assert mine["approx_kl"] == pytest.approx(wanted["approx_kl"], abs=1e-5)
    assert mine["num_tokens"] == wanted["num_tokens"]
    assert mine["text_loss"] == pytest.approx(wanted.get("text_loss"), abs=1e-5)
    for role, outcome in mine["outcomes"].items():
        assert outcome["grad_norm"] == pytest.approx(wanted[f"{role}_norm"], rel=1e-5, abs=1e-5)
    if first:
        assert mine["ratio_error"] <= 1e-6
    else:
        assert mine["ratio_error"] is None


def assert_same_weights(ours, theirs):
    assert {in_peft(name) for name in ours} == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[in_peft(name)], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_a_plain_loop_over_separate_models(usual, plainly, name):
    assert_same_run(usual(name), plainly(name))


@pytest.mark.parametrize(
    ("name", "micro"), [("ppo", 2), *[("entropy, text and average", 2), ("grpo", 3)] * ALL]
)
def test_steps_of_replayed_passes_are_those_of_the_plain_loop(reports_of, plainly, name, micro):
    (report,) = reports_of(name, {"recorded": True, "micro": micro})
    assert_same_run(report, plainly(name))
    assert min(report["tapes"]) >= 4  # of each role, two shapes or more


def test_the_cases_clip_what_they_are_to_clip(usual):
    for name in CASES:
        steps = [step for each in usual(name)["iterations"] for step in each["steps"]]
        assert max(step["outcomes"]["actor"]["grad_norm"] for step in steps) > 1.0
        if name != ONE_PASS:
            assert max(step["clip_fraction"] for step in steps) > 0.05
            assert max(step["value_clip_fraction"] or 0.0 for step in steps) > 0.05 or (
                CASES[name][1].get("algorithm", "ppo") != "ppo"
            )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ppo", [{"micro": 2, "stage": 0}, {"micro": 1, "stage": 3}]),
        *[
            ("entropy, text and average", [{"micro": 2, "stage": 2}, {"micro": 1, "stage": 3}]),
            ("grpo", [{"micro": 1, "stage": 1}]),
            (ONE_PASS, [{"micro": 4}, {"micro": 4, "stage": 3}, {"micro": 2}]),
        ]
        * ALL,
    ],
)
def test_two_processes_take_the_steps_of_the_plain_loop(reports_of, plainly, name, changes):
    for report in reports_of(name, *changes, size=2):
        assert_same_run(report, plainly(name))
        assert_same_average(report, plainly(name))


def assert_same_average(report, expected):
    for name, value in report["average"].items():
        torch.testing.assert_close(value, expected["average"][in_peft(name)], rtol=0.0, atol=1e-5)


def test_moving_average_is_the_plain_recursion_over_every_step(usual, plainly):
    name = "entropy, text and average"
    report = usual(name)
    assert report["average"].keys() == report["trained"]["actor"].keys()
    assert_same_average(report, plainly(name))
    behind = [v - report["trained"]["actor"][n] for n, v in report["average"].items()]
    assert max(float(each.abs().max()) for each in behind) > 1e-3


def figures(report):
    """All numbers of a report in one line."""
    return [
        step[name]
        for each in report["iterations"]
        for step in each["steps"]
        for name in (*FIGURES, "approx_kl", "num_tokens", "text_loss")
        if step[name] is not None
    ]


def test_a_pass_made_for_old_logprobs_alone_changes_nothing(usual, reports_of):
    for report in reports_of(ONE_PASS, {"defers": False}, {"micro": 3}, {"micro": 1}):
        single = usual(ONE_PASS)
        assert figures(report) == pytest.approx(figures(single), abs=1e-6)
        for ours, theirs in zip(report["iterations"], single["iterations"], strict=True):
            for name in ("advantages", "returns", "kl", "values"):
                torch.testing.assert_close(ours[name], theirs[name], rtol=0.0, atol=2e-6)
        for role, weights in report["trained"].items():
            for name, value in weights.items():
                torch.testing.assert_close(
                    value, single["trained"][role][name], rtol=0.0, atol=1e-5
                )


def test_old_logprobs_of_a_first_step_are_those_of_its_own_passes_to_the_bit(reports_of):
    for batches in ({"micro": 4}, {"micro": 2}):
        own, before = reports_of("grpo", batches, batches | {"defers": False})
        same_bits(own, before)
        for ours, theirs in zip(own["iterations"], before["iterations"], strict=True):
            assert ours["numbers"] == theirs["numbers"]
            for name in ("logprobs", "kl", "advantages"):
                assert torch.equal(ours[name], theirs[name]), name


def same_bits(report, other):
    assert figures(report) == figures(other)
    for role, weights in report["trained"].items():
        for name, value in weights.items():
            assert torch.equal(value, other["trained"][role][name]), name


def test_what_padding_holds_changes_no_bit(usual, reports_of):
    (report,) = reports_of("ppo", {"pad": 17})
    same_bits(report, usual("ppo"))


@pytest.mark.parametrize("name", ["ppo", "grpo", *["rloo"] * ALL])
def test_a_response_without_score_is_as_if_it_were_not_there(reports_of, name):
    responses = ragged_responses(9, group_size=3, seed=5)
    more = bonus(9, seed=2, unscored=(4,))
    steps = [[0, 4, 7, 2], [1, 3, 8], [5, 6]]
    rest = [n for n in range(9) if n != 4]
    run = {"iterations": [[responses, more]], "steps": steps}
    without = {
        "iterations": [[[responses[n] for n in rest], [more[n] for n in rest]]],
        "steps": [[rest.index(n) for n in step if n != 4] for step in steps],
    }
    unscored, absent = reports_of(name, run, without)
    assert figures(unscored) == pytest.approx(figures(absent), abs=1e-6)
    table, expected = (each["iterations"][0]["advantages"] for each in (unscored, absent))
    width = expected.shape[1]
    torch.testing.assert_close(table[rest, :width], expected, rtol=0.0, atol=2e-6)
    for role, weights in unscored["trained"].items():
        for key, value in weights.items():
            torch.testing.assert_close(value, absent["trained"][role][key], rtol=0.0, atol=1e-5)


def test_a_function_may_score_alone(reports_of, family):
    (both, alone) = reports_of("rloo", {}, {"scores": "nowhere"})
    model, function = (each["iterations"][0]["scores"] for each in (both, alone))
    more = [math.nan if b is None else b for b in CASES["rloo"][1]["iterations"][0][1]]
    torch.testing.assert_close(function, torch.tensor(more), equal_nan=True)
    assert (model - function).nan_to_num().abs().max() > 0.1


def test_infinite_scores_change_no_weight_of_either_role(reports_of, family):
    run = {"iterations": [[ragged_responses(4, seed=5), [0.0, math.inf, 1.0, 2.0]]]}
    (report,) = reports_of("ppo", run)
    (step,) = {tuple(sorted(s["outcomes"])) for s in report["iterations"][0]["steps"]}
    assert step == ("actor", "critic")
    for each in report["iterations"][0]["steps"]:
        assert [o["skipped"] for o in each["outcomes"].values()] == [True, True]
    (untouched,) = reports_of("ppo", {"iterations": []})
    for role, weights in report["trained"].items():
        for name, value in weights.items():
            assert torch.equal(value, untouched["trained"][role][name])
