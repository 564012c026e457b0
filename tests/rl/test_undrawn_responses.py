"""Runs of step 3 in which no token can be drawn: a response is left out, or a weight is named."""

import json

import pytest

from dschat_lora.config.addons import installed
from dschat_lora.rl.response.response import DecodedTurn
from helpers.rlhf_course import save_family, write_prompts
from helpers.spread import ALL

pytestmark = pytest.mark.stage
OPTIONS = """
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --eval_prompts 0 --num_train_epochs 1
    --reward_function helpers.rlhf_course:vowels --actor_lora_learning_rate 5e-3 --dtype fp32
    --algorithm reinforce_pp
""".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    save_family("opt", home, layers=1)
    write_prompts(home / "prompts.jsonl", 8)
    return home


def command_line(home, out, size, *more):
    rows = 8 // size
    return [
        *["--actor_model_name_or_path", str(home / "actor"), "--output_dir", str(home / out)],
        *["--data_path", str(home / "prompts.jsonl"), *OPTIONS, *more],
        *["--per_device_generation_batch_size", str(rows)],
        *["--per_device_training_batch_size", str(rows)],
    ]


@pytest.fixture(scope="module")
def lines(home, ranks):
    """Metrics of a run in whose only iteration two responses cannot be drawn."""
    argv = command_line(home, "some", 1)
    (report,) = ranks(1).run(
        "helpers.rlhf_course:train_rlhf_undrawn", argv=argv, places=[[0, 2], [1, 5]]
    )
    return json.loads(report["lines"])


def test_responses_whose_tokens_cannot_be_drawn_are_left_out_and_counted(lines, home):
    (train,) = [line for line in lines if line["kind"] == "train"]
    assert (train["undrawn"], train["dropped"], train["samples"]) == (2, 2, 8)
    assert isinstance(train["loss"], float)
    assert train["grad_norm"] > 0
    warnings = [line["message"] for line in lines if line.get("event") == "warning"]
    expected = (
        "2 of 8 responses (25%) are excluded: of 2 a token could not be sampled, as the logits "
        "were not finite"
    )
    assert warnings == [expected] * ("diagnostics" in installed())


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), *[(2, 3)] * ALL])
def test_a_weight_that_is_not_finite_ends_the_run_by_its_name(home, ranks, size, stage):
    argv = command_line(home, f"broken-{size}-{stage}", size, "--actor_zero_stage", str(stage))
    reports = ranks(size).run("helpers.rlhf_course:rlhf_refusal", argv=argv, spoil="fc1.weight")
    if size > 1:
        ranks(size).stop()  # a run that ends early leaves its ranks at different places
    line = reports[0].splitlines()[-1]
    assert line.startswith("error: stopped after step 0: no token can be sampled: the model's log")
    assert "fc1.weight holds NaN or infinity" in line
    assert line.endswith(". There is no checkpoint yet")


@pytest.mark.parametrize(
    ("tokens", "end", "kept"),
    [([7, 0], None, ((7, 0), False, True)), ([7, 8, 0], 1, ((7,), True, False))],
    ids=["nothing ends it", "a text ended it before"],
)
def test_what_cannot_be_drawn_is_no_end_unless_the_text_had_ended(tokens, end, kept):
    turn = DecodedTurn(tokens, [], [], undrawn=True)
    asked = []
    turn = turn.cut({0}.__contains__, lambda turn: asked.append(turn) or end)
    assert asked == [tokens[:-1]]  # without the one that could not be drawn
    assert (tuple(turn.tokens), turn.ended, turn.undrawn) == kept
