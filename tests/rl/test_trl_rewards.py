"""Reward functions of TRL's documentation: the same rewards, advantages and logs as in TRL."""

import asyncio
import json
import random
import re
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

from dschat_lora.algos.advantages import grpo_advantages
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, RewardFunctions, weighted_sum
from dschat_lora.rl.score.user_functions import RewardError, RewardLog, TrainerState, calls_of

trl = pytest.importorskip("trl")
trl_utils = pytest.importorskip("trl.chat_template_utils")

CPU = torch.device("cpu")
STATE = TrainerState(global_step=30, max_steps=100, epoch=0.3, num_train_epochs=1)

pytestmark = pytest.mark.usefixtures("one_rank")


class Letters:
    """A tokenizer of which token n is the n-th character of Unicode; below 3 are special ones."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i > 2)


def by_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def by_characters(completions, **kwargs):
    return [float(len(text)) for text in completions]


def by_format(completions, **kwargs):
    texts = [messages[0]["content"] for messages in completions]
    return [1.0 if re.match(r"^<a>.*?</a>", text) else 0.0 for text in texts]


def by_column(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    return [float(m is not None and m[1] == t) for m, t in zip(matches, ground_truth, strict=True)]


def of_maths(prompts, completions, task, **kwargs):
    scores = [1.0 if "4" in text else -1.0 for text in completions]
    return [s if t == "maths" else None for s, t in zip(scores, task, strict=True)]


def of_code(prompts, completions, task, **kwargs):
    scores = [1.0 if "def" in text else -1.0 for text in completions]
    return [s if t == "code" else None for s, t in zip(scores, task, strict=True)]


async def later(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [0.5 if text else 0.0 for text in completions]


def by_progress(completions, trainer_state, **kwargs):
    share = trainer_state.global_step / trainer_state.max_steps
    return [share * len(text) for text in completions]


def logging(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    scores = by_column(completions, ground_truth)
    log_extra("golden", list(ground_truth))
    log_extra("half", [s / 2 for s in scores])
    log_metric("accuracy", sum(scores) / len(scores))
    return scores


def text(prompt, **columns):
    return {"prompt": prompt, **columns}


def chat(prompt):
    return {"prompt": [{"role": "user", "content": prompt}]}


SKY = [text("The sky is"), text("The sun is")]
SUMS = [text("2 + 2?", ground_truth="4"), text("3 + 3?", ground_truth="6")]
TASKS = [text("2 + 2?", task="maths"), text("add", task="code"), text("A tale", task="none")]
ANSWERS = ["", "4", "def f", "<a>yes</a>", r"\boxed{4}", r"\boxed{6}", "blue and deep", "4 def"]

COPIES = len(ANSWERS)

CASES = {
    "ids": ([by_ids], [1.0], SKY),
    "characters": ([by_characters], [1.0], SKY),
    "format of messages": ([by_format], [1.0], [chat("a?"), chat("b?")]),
    "a column": ([by_column], [1.0], SUMS),
    "several tasks": ([of_maths, of_code], [1.0, 1.0], TASKS),
    "several tasks and one for all": ([of_maths, by_ids, of_code], [1.0, 0.25, 2.0], TASKS),
    "coroutines beside functions": ([later, by_characters], [1.0, 0.1], SKY),
    "the state of the trainer": ([by_progress], [1.0], SKY),
    "logs": ([logging], [1.0], SUMS),
}


def case(rows):
    """TRL's inputs, and the same as responses, ``COPIES`` to each row."""
    inputs, responses = [], []
    for group, row in enumerate(rows):
        for answer in random.Random(group).sample(ANSWERS, COPIES):
            inputs.append((row, answer))
            ids = tuple(map(ord, answer))
            responses.append(
                Response((9,), ids, True, group, json.dumps(row).encode(), (0.0,) * len(ids))
            )
    return inputs, responses


def trls(functions, weights, inputs):
    """Advantages, metrics and extra columns by TRL's own code."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=CPU, is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[])
    trainer.state = SimpleNamespace(**vars(STATE))
    trainer.environments, trainer.async_loop = None, loop
    trainer.reward_funcs = functions
    trainer.reward_func_names = [f.__name__ for f in functions]
    trainer.reward_processing_classes = [None] * len(functions)
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    rows = [row for row, _ in inputs]
    prompts = [row["prompt"] for row in rows]
    completions = [
        answer if isinstance(row["prompt"], str) else [{"role": "assistant", "content": answer}]
        for row, answer in inputs
    ]
    ids = [list(map(ord, answer)) for _, answer in inputs]
    with mock.patch("trl.trainer.grpo_trainer.logger"):  # it would ask for accelerate's state
        rewards_by_function = trainer._calculate_rewards(rows, prompts, completions, ids)
    loop.call_soon_threadsafe(loop.stop)
    # As _generate_and_score_completions goes on, with scale_rewards "group".
    unscored = rewards_by_function.isnan().all(dim=1)
    rewards = (
        (rewards_by_function * torch.tensor(weights)).nansum(dim=1).masked_fill(unscored, torch.nan)
    )
    grouped = rewards.view(-1, COPIES)
    spread = trl.trainer.utils.nanstd(grouped, dim=1, keepdim=True)
    advantages = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (spread + 1e-4)
    return (
        advantages.flatten().nan_to_num(0.0),
        {name: sum(v) / len(v) for name, v in trainer._pending_metrics.items()},
        dict(trainer._pending_extra_logs),
    )


@pytest.mark.parametrize("name", CASES)
def test_advantages_and_logs_are_those_of_trl(name):
    functions, weights, rows = CASES[name]
    inputs, responses = case(rows)
    expected, metrics, columns = trls(functions, weights, inputs)
    log = RewardLog()
    mine = tuple(
        RewardFunction("reward_function", f"mine:{f.__name__}", f, Letters(), log=log)
        for f in functions
    )
    scorer = RewardFunctions(mine, log)
    assert scorer.logs
    scores = scorer(responses, STATE)
    total = weighted_sum(scores.by_name, dict(zip(scorer.names, weights, strict=True)))
    groups = torch.tensor([each.group for each in responses])
    alone = len(groups) + torch.arange(len(groups))
    advantages = grpo_advantages(total.nan_to_num(0.0), torch.where(total.isnan(), alone, groups))
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-6)
    assert (advantages != 0).any()
    assert (scores.metrics, scores.columns) == (metrics, columns)
    assert scorer.log.take(responses) == ({}, {})


CALL = '<tool_call>\n{"name": "times", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
TIMES = {"type": "function", "function": {"name": "times", "arguments": {"a": 3, "b": 4}}}
TURNS = [
    CALL,
    f"Sure. {CALL}\n",
    f"Let me\n\n{CALL}\n{CALL}",
    f"<think>\nhm\n</think>\n\n{CALL}",
    "<think>\nhm\n</think>\n\nYes.",
    "<think>\n\n</think>\n\nYes.",
    "<think>\nhm",
    " Plain \n",
    '<tool_call>\n{"name": "ti',
    '<tool_call>\n{"name": "now"}\n</tool_call>',
    f"hm {CALL}\n</think>\n\nYes.",
]


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("qwen3", TURNS[:-1]),
        ("qwen3_5_think", [TURNS[-1], "hm", TURNS[4], "hm\n</think>\n\nYes."]),
        ("gptoss", ["<|channel|>final<|message|>Yes.<|return|>"]),
    ],
)
def test_completions_of_a_run_with_tools_are_the_messages_that_trl_parses(name, turns):
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    end = "<|return|>" if name == "gptoss" else "<|im_end|>"
    tokenizer.add_special_tokens({"eos_token": end})
    trl_utils.add_response_schema(tokenizer)
    asked = {"prompt": [{"role": "user", "content": "3 x 4?"}], "tools": [{"type": "function"}]}
    prompt = tokenizer.apply_chat_template(
        asked["prompt"], add_generation_prompt=True, return_dict=False
    )
    for turn in turns:
        is_cut = turn in ("hm", "<think>\nhm")
        text = turn if is_cut else turn.removesuffix(end) + end
        ids = tokenizer(text, add_special_tokens=False).input_ids
        expected = trl_utils.parse_response(tokenizer, ids, prefix=prompt)
        response = Response(tuple(prompt), tuple(ids), True, 0, json.dumps(asked).encode())
        (call,) = calls_of(lambda completions, messages: 0, [response], tokenizer)
        assert call["completions"] == [[expected]]
        assert call["messages"] == [[*asked["prompt"], expected]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"Sure. {CALL}", {"content": "Sure.", "tool_calls": [TIMES]}),
        (f"{CALL} <tool_call> no", {"content": "<tool_call> no", "tool_calls": [TIMES]}),
        ("<think>hm</think> Yes. ", {"content": "<think>hm</think> Yes. "}),
        ('{"name": "f", "parameters": {}}', {"content": '{"name": "f", "parameters": {}}'}),
    ],
)
def test_without_tools_an_answer_is_text_unless_it_has_a_marked_call(text, message):
    row = {"prompt": [{"role": "user", "content": "3 x 4?"}]}
    response = Response((40,), (*map(ord, text), 2), True, 0, json.dumps(row).encode())
    (call,) = calls_of(lambda completions: 0, [response], Letters())
    assert call["completions"] == [[{"role": "assistant", **message}]]
    (own,) = calls_of(lambda responses: 0, [response], Letters())
    assert own["responses"] == [text]


def test_what_json_cannot_hold_is_refused_with_the_functions():
    log = RewardLog()
    _, responses = case(SKY)
    log.log_extra(responses, "bad", [{(1, 2): 3}] * len(responses))
    with pytest.raises(RewardError) as caught:
        log.take(responses)
    assert "keys must be" in str(caught.value.__cause__)
    with pytest.raises(ValueError, match=r"log_extra.'few', .... got 1 values for 16 responses"):
        log.log_extra(responses, "few", [1])
