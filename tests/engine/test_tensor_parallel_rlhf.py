"""Step 3 by processes that hold one model between them: the very run of one process."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.rlhf_course import save_family, write_prompts, write_texts
from helpers.tiny import KINDS

pytestmark = [pytest.mark.stage, pytest.mark.thorough]

# Two iterations of eight responses, four a step, the second one cut short.
STEPS = 3
COMMON = f"""
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --max_steps {STEPS} --num_train_epochs 9
    --eval_ratio 0 --eval_prompts 3 --actor_lora_learning_rate 5e-3
    --critic_lora_learning_rate 5e-3 --critic_learning_rate 1e-3 --num_warmup_steps 1
    --save_interval 0 --save_minutes 0 --kl_coef 0.05 --entropy_coef 0.01
    --unsup_coef 0.5 --enable_ema --ema_decay 0.8 --per_device_generation_batch_size 8
    --per_device_training_batch_size 2 --gradient_accumulation_steps 2
    --reward_function helpers.tensor_parallel_roles:counted_vowels
""".split()
LAYOUTS = {
    "tokens dealt": "--tensor_parallel_size 2 --sequence_parallel",
    "ZeRO 3": "--tensor_parallel_size 2 --actor_zero_stage 3 --critic_zero_stage 3",
}
LAYER_BY_LAYER = "ZeRO 3"  # decodes as where the whole weights do not fit


@pytest.fixture(scope="module")
def reports(ranks, tmp_path_factory):
    """``reports()``: each rank's report of each layout; "whole" for one process."""
    home = tmp_path_factory.mktemp("rlhf")
    write_prompts(home / "prompts.jsonl", 16)
    write_prompts(home / "held.jsonl", 3, seed=1)
    write_texts(home / "texts.jsonl", 9)
    family = save_family("opt", home / "opt")

    def command_line(layout):
        return [
            *["--actor_model_name_or_path", family["actor"]],
            *["--critic_model_name_or_path", family["reward"]],
            *["--data_path", home / "prompts.jsonl", "--eval_data_path", home / "held.jsonl"],
            *["--unsupervised_dataset_name", home / "texts.jsonl", *COMMON],
            *["--output_dir", home / layout, *LAYOUTS.get(layout, "").split()],
        ]

    @cache
    def of():
        by_layout = {}
        for size, layouts in ((1, ["whole"]), (2, list(LAYOUTS))):
            results = ranks(size).run(
                "helpers.tensor_parallel_roles:train_roles_many",
                runs=[
                    {
                        "argv": list(map(str, command_line(layout))),
                        "layer_by_layer": layout == LAYER_BY_LAYER,
                    }
                    for layout in layouts
                ],
            )
            for layout, each in zip(layouts, zip(*results, strict=True), strict=True):
                by_layout[layout] = [report | {"out": home / layout} for report in each]
        return by_layout

    return of


FIGURES = """
    kind step iteration loss policy_loss value_loss text_loss entropy reward reward_std
    scaled_reward kl kl_k3 explained_variance approx_kl response_length eos_rate grad_norm
    critic_grad_norm samples tokens supervised_tokens learning_rate lora_learning_rate
    greedy_reward greedy_kl updates dropped
""".split()


def test_steps_of_a_divided_model_are_those_of_a_whole_one(reports):
    expected = reports()["whole"][0]
    values = [step["value_loss"] for step in expected["steps"]]
    assert len(values) == STEPS
    # The agreement says something only where training moves the loss much further.
    assert max(values) - min(values) > 1e-2
    for layout in LAYOUTS:
        for report in reports()[layout]:
            assert len(report["steps"]) == STEPS
            for ours, theirs in zip(report["steps"], expected["steps"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)


def test_log_of_a_divided_run_is_that_of_a_whole_one(reports):
    expected = json.loads(reports()["whole"][0]["lines"])
    for layout in LAYOUTS:
        lines = json.loads(reports()[layout][0]["lines"])
        assert len(lines) == len(expected)
        for ours, theirs in zip(lines, expected, strict=True):
            names = [name for name in FIGURES if name in theirs]
            numbers = [n for n in names if isinstance(theirs[n], float)]
            assert [ours[n] for n in names if n not in numbers] == [
                theirs[n] for n in names if n not in numbers
            ]
            assert [ours[n] for n in numbers] == pytest.approx(
                [theirs[n] for n in numbers], abs=2e-5, rel=1e-5
            )


def test_ranks_of_a_model_draw_the_same_bits_and_the_tokens_of_a_whole_one(reports):
    (whole,) = reports()["whole"]
    ends = [tokens[-1] == 2 for drawn in whole["drawn"] for tokens, _ in drawn]
    assert 0 < sum(ends) < len(ends)
    for layout in LAYOUTS:
        first, second = reports()[layout]
        assert first["drawn"] == second["drawn"]
        assert [[tokens for tokens, _ in drawn] for drawn in first["drawn"]] == [
            [tokens for tokens, _ in drawn] for drawn in whole["drawn"]
        ]


def test_what_every_rank_holds_stays_the_same_bits_after_every_step(reports):
    """Factors and the head of the critic among it, which train on every rank."""
    for layout in LAYOUTS:
        for report in reports()[layout]:
            assert report["watched"] == 2 * STEPS
            assert report["unlike"] == []
            assert report["changed"] == []


def test_a_reward_function_is_asked_once_about_each_response(reports):
    """Answers that differ from call to call would drive the ranks of a model apart."""
    (whole,) = reports()["whole"]
    assert whole["asked"] == sum(len(drawn) for drawn in whole["drawn"])
    for layout in LAYOUTS:
        asked = [report["asked"] for report in reports()[layout]]
        assert sum(asked) == whole["asked"]
        assert min(asked) > 0


def test_tensors_written_by_ranks_that_divide_a_model_are_whole(reports):
    for role in ("actor", "critic", "actor_ema"):
        path = Path(role) / "adapter" / "adapter_model.safetensors"
        expected = load_file(reports()["whole"][0]["out"] / path)
        assert expected
        for layout in LAYOUTS:
            tensors = load_file(reports()[layout][0]["out"] / path)
            assert tensors.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(tensors[name], value, rtol=1e-5, atol=1e-5)


def test_parameters_are_counted_as_those_of_a_whole_model(reports):
    counts = {
        layout: json.loads((each[0]["out"] / "run.json").read_text(encoding="utf-8"))
        for layout, each in reports().items()
    }
    for layout in LAYOUTS:
        assert counts[layout]["parameters"] == counts["whole"]["parameters"]
        ours, theirs = counts[layout]["phases"], counts["whole"]["phases"]
        for name in theirs:
            assert ours[name]["flops"] == pytest.approx(theirs[name]["flops"])


# ---------------------------------------------------------------------------- decoding


@pytest.fixture(scope="module")
def decoded(ranks, model_directory):
    """``decoded()``: of each kind of model (what one process decodes, what two ranks do)."""

    @cache
    def of():
        paths = [model_directory(kind) for kind in KINDS]
        run = "helpers.tensor_parallel_roles:decode_many"
        (whole,) = ranks(1).run(run, paths=paths)
        divided = ranks(2).run(run, paths=paths, tensor_parallel=2, sequence_parallel=True)
        return dict(zip(KINDS, zip(whole, zip(*divided, strict=True), strict=True), strict=True))

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_and_without_a_cache_is_that_of_a_whole_model(decoded, kind):
    whole, reports = decoded()[kind]
    lengths = {len(tokens) for tokens in whole["cached"][0]}
    assert len(lengths) > 1  # some end early
    for way in ("cached", "recomputed"):
        first, second = (report[way] for report in reports)
        assert first == second
        assert first[0] == whole["cached"][0]
        for ours, theirs in zip(first[1], whole["cached"][1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_quick_divided_layers_compute_what_slow_and_whole_ones_do(decoded, kind):
    whole, reports = decoded()[kind]
    for report in reports:
        for way in ("slow", "quick"):
            torch.testing.assert_close(report[way], whole["slow"], rtol=0.0, atol=1e-5)
