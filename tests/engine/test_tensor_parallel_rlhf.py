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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_and_log_of_a_divided_model_are_those_of_a_whole_one(reports, layout):
    (whole,) = reports()["whole"]
    values = [step["value_loss"] for step in whole["steps"]]
    # The agreement says something only where training moves the loss much further.
    assert max(values) - min(values) > 1e-2
    for report in reports()[layout]:
        assert len(report["steps"]) == STEPS
        for ours, theirs in zip(report["steps"], whole["steps"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    lines, expected = (json.loads(each["lines"]) for each in (reports()[layout][0], whole))
    for ours, theirs in zip(lines, expected, strict=True):
        numbers = {n: theirs[n] for n in FIGURES if isinstance(theirs.get(n), float)}
        assert {n: ours[n] for n in numbers} == pytest.approx(numbers, abs=2e-5, rel=1e-5)
        others = {n: theirs[n] for n in FIGURES if n in theirs and n not in numbers}
        assert {n: ours[n] for n in others} == others


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_model_draw_the_same_bits_and_hold_them_after_every_step(reports, layout):
    """Factors and the head of the critic among it, which train on every rank.

    A reward function is asked once about each response: answers that differ from call to call
    would drive the ranks of a model apart.
    """
    (whole,), every = reports()["whole"], reports()[layout]
    tokens = [[tokens for tokens, _ in drawn] for drawn in whole["drawn"]]
    ends = [each[-1] == 2 for drawn in tokens for each in drawn]
    assert 0 < sum(ends) < len(ends)
    assert whole["asked"] == len(ends)
    for report in every:
        assert report["drawn"] == every[0]["drawn"]
        assert [[tokens for tokens, _ in drawn] for drawn in report["drawn"]] == tokens
        assert report["watched"] == 2 * STEPS
        assert report["unlike"] == report["changed"] == []
        assert 0 < report["asked"] < len(ends)
    assert sum(report["asked"] for report in every) == len(ends)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_and_counts_that_ranks_write_are_those_of_a_whole_model(reports, layout):
    out, whole = (reports()[each][0]["out"] for each in (layout, "whole"))
    for role in ("actor", "critic", "actor_ema"):
        path = Path(role) / "adapter" / "adapter_model.safetensors"
        tensors, expected = load_file(out / path), load_file(whole / path)
        assert tensors.keys() == expected.keys() != set()
        for name, value in expected.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-5, atol=1e-5)
    ours, theirs = (json.loads((each / "run.json").read_text("utf-8")) for each in (out, whole))
    assert ours["parameters"] == theirs["parameters"]
    for name, phase in theirs["phases"].items():
        assert ours["phases"][name]["flops"] == pytest.approx(phase["flops"])


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
    assert len({len(tokens) for tokens in whole["cached"][0]}) > 1  # some end early
    for report in reports:
        for way in ("cached", "recomputed"):
            tokens, logprobs = report[way]
            assert (tokens, logprobs) == reports[0][way]
            assert tokens == whole["cached"][0]
            for ours, theirs in zip(logprobs, whole["cached"][1], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
        for way in ("slow", "quick"):
            torch.testing.assert_close(report[way], whole["slow"], rtol=0.0, atol=1e-5)
