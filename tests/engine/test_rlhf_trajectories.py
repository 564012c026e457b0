"""Step 3 at every ZeRO stage, in one and two processes: one and the same run."""

import json
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.addons import of_addon, of_the_whole
from helpers.rlhf_course import save_family, write_prompts, write_texts, write_turns_template
from helpers.served import served
from helpers.spread import ALL
from helpers.step1 import write_jsonl

pytestmark = pytest.mark.stage

# The last iteration of two ends in the middle of its passes.
STEPS = 5
EVERYWHERE = [(size, stage) for size in (1, 2) for stage in (0, 1, 2, 3)]


def places(*spread):
    """(processes, stage) of the runs of a kind: the first, a spread, or all of them."""
    return EVERYWHERE if ALL else [(1, 0), *spread]


# Eight responses an iteration, four a step.
RESPONSES, ROWS = 8, 4
COMMON = f"""
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --max_steps {STEPS} --eval_prompts 0
    --eval_ratio 0 --actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3
    --critic_learning_rate 1e-3 --num_warmup_steps 2 --save_interval 0 --save_minutes 0
    --num_train_epochs 9
""".split()
TWO_PASSES = "--ppo_epochs 2 --kl_coef 0.05 --entropy_coef 0.01"
MORE = "--unsupervised_dataset_name texts.jsonl --unsup_coef 0.5 --enable_ema --ema_decay 0.8"
LOOKS = "--eval_prompts 3"
FUNCTION = "--reward_function helpers.rlhf_course:vowels"
TURNS = (
    "--environment helpers.rlhf_course:ask_again --max_turns 3 --max_answer_seq_len 16 "
    "--chat_template turns.jinja --stop_tokens e i n t"
) * bool(of_addon("environments.addon"))
DISTILL = {
    "distill": (
        "llama",
        places((2, 3)),
        "--algorithm distill --num_generations 2 --ppo_epochs 2 --teacher_model_name_or_path "
        "TEACHER --on_policy_share 0.6 --distill_loss jsd",
    ),
    "distill on drawn tokens": (
        "opt",
        places((2, 2)),
        "--algorithm distill --teacher_model_name_or_path BASE --distill_loss sampled_reverse_kl "
        "--teacher_system_prompt be",
    ),
}
if not of_addon("distill.addon"):
    DISTILL = {}
# name: (architecture, (processes, stage) of each run, options)
KINDS = {
    "ppo": ("opt", places((2, 3)), f"{TWO_PASSES} {MORE} {LOOKS}"),
    "ppo of llama": ("llama", places((1, 3), (2, 2)), f"{TWO_PASSES} --reward_scaling running"),
    "rloo in turns": (
        "opt",
        places((2, 3)),
        f"--algorithm rloo --num_generations 2 --top_p 0.9 --importance_cap 2 {TURNS}",
    ),
    "rollouts ahead": (
        "opt",
        places((2, 3)),
        "--algorithm grpo --num_generations 4 --ppo_epochs 2 --rollout_engine SERVER "
        "--rollouts_ahead 1",
    ),
    "grpo": ("opt", places((2, 2)), "--algorithm grpo --num_generations 4 --ppo_epochs 2"),
    **DISTILL,
    "an iteration in one step": (
        "opt",
        places((2, 3)),
        "--num_generations 4 --critic_warmup_iterations 2",
    ),
    "seven prompts": ("opt", places((2, 2)), f"{TWO_PASSES} {FUNCTION}"),
    **{
        f"{name}{more}": (
            "opt",
            [(1, 0), (2, 3)],
            f"--algorithm {name}{more} --num_generations 4 --ppo_epochs 2",
        )
        for name, more in (
            ("dr_grpo", ""),
            ("dapo", " --no-mask_truncated_completions"),
            ("gspo", ""),
            ("cispo", ""),
            ("reinforce_pp", ""),
        )
        * ALL
    },
    # OPT's biases of keys have no gradient but rounding, of which Adam makes whole steps.
    "every weight of the critic": (
        "llama",
        places((2, 1)),
        f"{TWO_PASSES} --critic_learning_rate 3e-4",
    ),
}


# one of each: an actor and a critic, groups without one, a teacher, a function, whole weights
NAMES = [
    name
    for name in KINDS
    if (ALL and (name != "rollouts ahead" or of_addon("engines")))
    or name in ("ppo", "grpo", "distill on drawn tokens", "seven prompts")
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with models, prompts and pretraining text."""
    home = tmp_path_factory.mktemp("rlhf")
    write_prompts(home / "prompts.jsonl", 24)
    write_prompts(home / "seven.jsonl", 7)
    rows = [json.loads(line) for line in (home / "prompts.jsonl").read_text().splitlines()]
    write_jsonl(home / "answers.jsonl", [{**r, "completion": r["prompt"][::-1]} for r in rows])
    write_prompts(home / "held.jsonl", 3, seed=1)
    write_texts(home / "texts.jsonl", 9)
    write_turns_template(home / "turns.jinja")
    # Else DeepSpeed keeps parameters as small as these whole on every rank, or fetches all of
    # them ahead, which it does not of larger models: two engines on one base get in each
    # other's way there.
    sharded = {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_max_live_parameters": 3000,
        "stage3_max_reuse_distance": 9000,
    }
    text = json.dumps({"zero_optimization": sharded})
    (home / "sharded.json").write_text(text, encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def family(home):
    """``family(kind)``: paths of the models of an architecture."""

    @cache
    def of(kind):
        return save_family(kind, home / kind)

    return of


@pytest.fixture(scope="module")
def server(family):
    """``server()``: the address of a server of the base of OPT's shape."""
    with ExitStack() as stack:

        @cache
        def start():
            server = served(family("opt")["base"], allow_runtime_lora_updating=True)
            return stack.enter_context(server)

        yield start


@pytest.fixture(scope="module")
def run_many(home, family, server, ranks):
    """``run_many(size, runs)``: rank 0's report of each; runs are (name, stages, layer by layer)"""

    def call(size, runs):
        arguments, outs = [], []
        for name, (actor_stage, critic_stage), layer_by_layer in runs:
            family("opt")  # whose base is a teacher
            out = home / f"{name}-{size}-{actor_stage}{critic_stage}{layer_by_layer}"
            argv = command_line(name, home, family(KINDS[name][0]), size)
            argv += ["--actor_zero_stage", actor_stage, "--critic_zero_stage", critic_stage]
            if 3 in (actor_stage, critic_stage):
                argv += ["--deepspeed_config", home / "sharded.json"]
            argv += ["--output_dir", out]
            argv = [server() if each == "SERVER" else each for each in argv]
            arguments.append({"argv": list(map(str, argv)), "layer_by_layer": layer_by_layer})
            outs.append(out)
        results = ranks(size).run(
            "helpers.rlhf_course:train_rlhf_many", timeout=300, runs=arguments
        )
        for each in results[1:]:
            # Every rank knows what the others said.
            assert [r["texts"] for r in each] == [r["texts"] for r in results[0]]
            assert [r["steps"] for r in each] == [r["steps"] for r in results[0]]
        return [
            {**report, "out": out, "lines": json.loads(report["lines"])}
            for report, out in zip(results[0], outs, strict=True)
        ]

    return call


def command_line(name, home, models, size):
    options = KINDS[name][2]
    for file in ("texts.jsonl", "turns.jinja"):
        options = options.replace(file, str(home / file))
    # A teacher of another architecture, and one on the actor's base.
    options = options.replace("TEACHER", str(home / "opt" / "base"))
    options = options.replace("BASE", models["base"])
    critic = "whole" if name == "every weight of the critic" else "reward"
    one_step = name == "an iteration in one step"
    rows = RESPONSES if one_step else ROWS
    batches = 1 if "--num_generations 4" in options else 2
    data = {"seven prompts": "seven.jsonl", "distill": "answers.jsonl"}.get(name, "prompts.jsonl")
    scored = [] if name.startswith("distill") else ["--critic_model_name_or_path", models[critic]]
    return [
        *["--actor_model_name_or_path", models["actor"], *scored],
        *["--data_path", home / data],
        *["--eval_data_path", home / "held.jsonl", *COMMON],
        *["--per_device_generation_batch_size", RESPONSES // size // batches],
        *["--generation_batches", batches, "--per_device_training_batch_size", rows // size],
        # One process decodes other numbers of responses at a time than two.
        *(["--max_num_seqs", {"grpo": 4}.get(name, RESPONSES)] if size == 1 else []),
        *options.split(),
    ]


@pytest.fixture(scope="module")
def reports(run_many):
    """``reports(name)``: {(processes, stage): report} of a kind of run."""

    @cache
    def of(name):
        by_place = {}
        for size in (1, 2):
            stages = [stage for n, stage in KINDS[name][1] if n == size]
            results = run_many(size, [(name, (stage, stage), False) for stage in stages])
            by_place |= {(size, s): report for s, report in zip(stages, results, strict=True)}
        return by_place

    return of


def assert_same(found, expected):
    """Token for token the same texts, and figures and tensors but for rounding."""
    assert found["texts"] == expected["texts"]
    assert len(found["steps"]) == len(expected["steps"])
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert_close(ours, theirs)
    for ours, theirs in zip(found["lines"], expected["lines"], strict=True):
        assert_close(ours, theirs, names=FIGURES)
    assert found["trained"].keys() == expected["trained"].keys()
    for role, tensors in expected["trained"].items():
        assert found["trained"][role].keys() == tensors.keys()
        for name, value in tensors.items():
            torch.testing.assert_close(found["trained"][role][name], value, rtol=0.0, atol=1e-5)


def assert_close(found, expected, names=None):
    names = [n for n in expected if names is None or n in names]
    numbers = [n for n in names if isinstance(expected[n], float)]
    for name in names:
        assert name in numbers or found[name] == expected[name], name
    assert {n: found[n] for n in numbers} == pytest.approx(
        {n: expected[n] for n in numbers}, abs=1e-5, rel=1e-5
    )


FIGURES = """
    kind step iteration epoch loss policy_loss value_loss text_loss entropy reward reward_std
    scaled_reward kl kl_k3 explained_variance approx_kl response_length eos_rate grad_norm
    critic_grad_norm samples tokens supervised_tokens learning_rate lora_learning_rate
    critic_lora_learning_rate greedy_reward greedy_kl kl_coef updates dropped turns
    environment_tokens
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_run_is_the_same_at_every_zero_stage_and_number_of_processes(reports, name):
    by_place = reports(name)
    expected = by_place[1, 0]
    for report in by_place.values():
        assert_same(report, expected)
        assert report["changed"] == []  # of frozen tensors, in any bit
        # The first step starts where the policy sampled.
        trains = [line for line in report["lines"] if line["kind"] == "train"]
        assert max(line["ratio_error"] for line in trains) <= 1e-6
        assert report["steps"][0]["approx_kl"] == pytest.approx(0, abs=1e-7)
        assert report["steps"][0]["clip_fraction"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_run_says_something_of_what_it_compares(reports, name):
    """Responses end and are cut off, the policy moves far, and steps are as many as planned."""
    report = reports(name)[1, 0]
    assert len(report["steps"]) == STEPS
    ends = [tokens[-1] == 2 for texts in report["texts"] for tokens in texts]
    assert 0.05 < sum(ends) / len(ends) < 0.95
    trains = [line for line in report["lines"] if line["kind"] == "train"]
    assert trains[-1]["step"] == STEPS
    # A hundred times what figures may differ by, after the first iteration.
    assert abs(trains[-1]["kl"]) > 1e-3
    assert max(line["reward"] for line in trains) > min(line["reward"] for line in trains)
    if report["steps"][0]["value_loss"] is not None:
        values = [step["value_loss"] for step in report["steps"]]
        assert max(values) - min(values) > 1e-2


@pytest.mark.parametrize("name", ["ppo", *["ppo of llama"] * ALL])
def test_written_adapters_are_the_same_at_every_stage(reports, name):
    roles = ["actor", "critic", *(["actor_ema"] if name == "ppo" else [])]
    by_place = reports(name)
    for role in roles:
        path = Path(role) / "adapter" / "adapter_model.safetensors"
        expected = load_file(by_place[1, 0]["out"] / path)
        assert expected
        for report in by_place.values():
            tensors = load_file(report["out"] / path)
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(tensors[key], value, rtol=0.0, atol=1e-5)


def test_moving_average_lies_between_start_and_end(reports, family):
    out = reports("ppo")[2, 3]["out"]
    path = Path("adapter_model.safetensors")
    start = load_file(Path(family("opt")["actor"]) / path)
    end, average = (load_file(out / role / "adapter" / path) for role in ("actor", "actor_ema"))
    assert start.keys() == end.keys() == average.keys()
    moved = {key: (end[key] - start[key]).norm() for key in start}
    for key, value in average.items():
        assert 0 < (value - start[key]).norm() < moved[key]
        assert (value - end[key]).norm() > 1e-4


def test_reference_stays_the_actor_that_training_began_with(reports, family):
    stored = load_file(Path(family("opt")["actor"]) / "adapter_model.safetensors")
    for report in reports("ppo").values():
        for name, value in report["reference"].items():
            key = f"base_model.model.{name.removeprefix('roles.')}.weight"
            assert torch.equal(value, stored[key])


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2] if ALL else [2])
def test_rollout_layer_by_layer_says_what_gathered_weights_say(run_many, reports, size):
    # A rank of two then has a response less to write than the other.
    (report,) = run_many(size, [("seven prompts", (3, 3), True)])
    assert_same(report, reports("seven prompts")[1, 0])


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "stages"), [(2, (0, 3)), (2, (3, 1))])
def test_roles_on_bases_of_their_own_may_have_stages_of_their_own(run_many, reports, size, stages):
    name = "every weight of the critic"
    (report,) = run_many(size, [(name, stages, False)])
    assert_same(report, reports(name)[1, 0])


def test_last_iteration_of_an_epoch_has_what_is_left(reports):
    # Seven prompts: an iteration's eight responses are those to all of them.
    for report in reports("seven prompts").values():
        trains = [line for line in report["lines"] if line["kind"] == "train"]
        assert [line["samples"] for line in trains] == [7, 7]
        assert [step["tokens"] for step in report["steps"]] == [
            step["tokens"] for step in reports("seven prompts")[1, 0]["steps"]
        ]
        rollouts = [texts for texts in report["texts"] if len(texts) == 7]
        assert len(rollouts) == len(trains)


@pytest.mark.thorough
def test_each_prompt_gets_responses_of_its_own(reports):
    for texts in reports("an iteration in one step")[2, 3]["texts"]:
        if len(texts) == RESPONSES:
            for group in (texts[:4], texts[4:]):
                assert len({tuple(tokens) for tokens in group}) > 1


@of_the_whole
@pytest.mark.thorough
def test_an_environment_adds_turns_that_are_read_alone(reports):
    trains = [r for r in reports("rloo in turns")[1, 0]["lines"] if r["kind"] == "train"]
    assert all(1 < line["turns"] < 3 for line in trains)
    for line in trains:
        read = line["environment_tokens"] * line["samples"]
        whole = line["tokens"] - line["supervised_tokens"]
        assert 0 < read < whole  # prompts are read too


@pytest.mark.thorough
def test_while_the_critic_warms_up_the_actor_stays(reports):
    for report in reports("an iteration in one step").values():
        trains = [line for line in report["lines"] if line["kind"] == "train"]
        assert [line["grad_norm"] is None for line in trains] == [True, True, False, False, False]
        assert all(line["critic_grad_norm"] > 0 for line in trains)
        kl = [abs(line["kl"]) for line in trains]
        assert max(kl[:3]) < 1e-6 < 1e-3 < min(kl[3:])


@pytest.mark.thorough
def test_an_iteration_in_one_step_is_read_once(reports):
    """The update's own forward pass is then what old log-probabilities come from."""
    report = reports("an iteration in one step")[1, 0]
    trains = [line for line in report["lines"] if line["kind"] == "train"]
    assert [line["updates"] for line in trains] == [1] * STEPS
    assert all(line["ratio_error"] == 0 for line in trains)
