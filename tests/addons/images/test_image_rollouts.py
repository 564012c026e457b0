"""Step 3 with pictures in prompts: sampler, trainer and stock models agree, and what users see."""

import json
from functools import cache

import datasets
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import dschat_lora
from addons.images.training import Seeing
from addons.images.vlms import spread
from dschat_lora.addons.images.vision import PictureInputs
from dschat_lora.addons.report.rollouts import (
    RolloutQuery,
    read_rollouts,
    show_rollouts,
    summary_text,
)
from dschat_lora.data.media import FIRST_ID
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import lora_layers
from dschat_lora.rl.learn.roles import build_roles
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from dschat_lora.runtime.validation import Sources
from helpers.roles import asked_of, config_of

SEED = 0
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
IMAGE = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


# Names of the pictures of a prompt, and its parts. Texts are the same with one picture, with
# another, and with both; the last two begin alike for more tokens than a prefix needs.
PROMPTS = [
    (["tall"], [IMAGE, text("What is this?")]),
    (["wide"], [IMAGE, text("What is this?")]),
    (["tall"], [IMAGE, text("What is this?")]),
    (["wide", "square"], [IMAGE, text(" and "), IMAGE, text("alike?")]),
    (["square", "square"], [IMAGE, text(" and "), IMAGE, text("alike?")]),
    ([], [text("Say something.")]),
]


ROWS = [
    {
        "prompt": [{"role": "user", "content": parts}],
        "images": [f"{name}.png" for name in names],
        "number": number,
    }
    for number, (names, parts) in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By type: the tiny model beside its pictures, with tokens of the prompts."""

    def of(kind):
        seeing = Seeing(kind, tmp_path_factory.mktemp(kind))
        records = seeing.data(ROWS, "prompts")
        tokens = {json.loads(each.columns)["number"]: each.input_ids.tolist() for each in records}
        seeing.prompts = [tokens[number] for number in range(len(PROMPTS))]
        return seeing

    return cache(of)


def stock_inputs(seeing, number):
    """Of a prompt, what the model's own processor writes."""
    names, parts = PROMPTS[number]
    return seeing.all_inputs([{"role": "user", "content": parts}], names)


def stock_logprobs(model, inputs, tokens):
    """(n,) of a response's tokens, in nats; the model reads all but the last one."""
    inputs, size = dict(inputs), inputs["input_ids"].shape[1]
    read = torch.tensor([tokens[:-1]], dtype=torch.int64)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], read], 1)
    for name, fill in {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}.items():
        if name in inputs:
            more = torch.full_like(read, fill).to(inputs[name].dtype)
            inputs[name] = torch.cat([inputs[name], more], 1)
    logits = model(**inputs).logits[0, size - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def merged(seeing, adapted):
    """The stock composite model with the adapter added to its weights."""
    stock = AutoModelForImageTextToText.from_pretrained(seeing.base, dtype=torch.float32).eval()
    for name, layer in lora_layers(adapted).items():
        down, up = (getattr(each, "weight", each) for each in (layer.lora_A, layer.lora_B))
        stock.get_submodule(name).weight.data += (up @ down).detach() * layer.scaling
    return stock


@pytest.mark.parametrize("kind", spread("gemma3", "qwen3_vl", "qwen3_5"))
def test_kept_logprobs_are_those_of_the_trainer_and_of_stock_transformers(kind, made):
    seeing = made(kind)
    roles = build_roles(
        config_of(actor={"lora_dim": 3, "target_modules": ATTENTION}, ppo={"algorithm": "grpo"}),
        Sources({"actor": seeing.source}),
        seeing.tokenizer,
        dtype=torch.float32,
        meta=False,
    )
    roles.take(seeing.media, Sources({"actor": seeing.source}))
    for name, parameter in roles.actor.model.named_parameters():
        if "lora_B" in name:
            seeded = torch.Generator().manual_seed(SEED + len(name))
            torch.nn.init.normal_(parameter.data, std=0.05, generator=seeded)
    stock, engines = merged(seeing, roles.actor.model), asked_of(roles)
    sampling = Sampling(max_new_tokens=5)
    prompts, copies = seeing.prompts, 2
    longest = max(map(len, prompts)) + 5
    # All rows at once, copies of a prompt read once; three rows, which are refilled;
    # without a cache.
    for rows, caches in ((12, True), (3, True), (12, False)):
        decoder = Decoder(
            roles.rollout.eval(),
            eos_ids=[],
            pad_id=0,
            device=torch.device("cpu"),
            largest=(rows, longest),
        )
        decoder.refills = caches
        seeds = [[2 * n, 2 * n + 1] for n in range(len(prompts))]
        answers = decoder(prompts, sampling, seeds=seeds, keep_logprobs=True)
        responses = [
            Response(tuple(prompts[n // copies]), tuple(tokens), False, n // copies)
            for n, tokens in enumerate(answers.tokens())
        ]
        kept = torch.tensor(answers.logprobs())
        assert all(token < FIRST_ID for each in responses for token in each.tokens)
        for shares in (False, True):
            batch = collate(responses, range(len(responses)), 0, shares_prompts=shares)
            for role in ("actor", "reference"):
                with torch.no_grad():
                    logprobs, _ = engines.policy(batch, 5, role)
                if role == "actor":
                    torch.testing.assert_close(logprobs, kept, atol=1e-5, rtol=0)
        for response, own in zip(responses, kept, strict=True):
            # Stock models read no image token without its picture: such a one may be the last.
            tokens = [*response.tokens, seeing.media.token_id]
            tokens = tokens[: tokens.index(seeing.media.token_id) + 1][:5]
            with torch.no_grad():
                inputs = stock_inputs(seeing, response.group)
                wanted = stock_logprobs(stock, inputs, tokens)
            torch.testing.assert_close(own[: len(tokens)], wanted, atol=1e-5, rtol=0)


def reward(completions, completion_ids, number, log_extra, **more):
    """Something of the tokens, which are kept with the number of their prompt."""
    log_extra("tokens", completion_ids)
    log_extra("number", number)
    return [score_of(ids) for ids in completion_ids]


def score_of(ids):
    return sum(i % 7 for i in ids) / len(ids)


OPTIONS = {
    "algorithm": "grpo",
    "num_generations": 2,
    "per_device_generation_batch_size": 12,
    "per_device_training_batch_size": 12,
    "max_prompt_seq_len": 200,
    "max_answer_seq_len": 5,
    "ppo_epochs": 2,
    "max_steps": 4,
    "num_train_epochs": 9,
    "eval_ratio": 0,
    "actor_lora_dim": 3,
    "actor_lora_learning_rate": 2e-3,
    "lr_scheduler_type": "constant",
    "num_warmup_steps": 0,
    # At 1e-8 a gradient that is rounding alone would make a whole step.
    "adam_epsilon": 1e-4,
    "kl_coef": 0.1,
    "reward_scaling": "none",
    "clip_reward_value": 0,
    "preprocessing_num_workers": 1,
    "log_rollouts": 100,
}


def train(seeing, name, model=None, rewards=reward, **options):
    """A run of step 3 on the prompts."""
    return dschat_lora.rlhf(
        str(model or seeing.base),
        str(seeing.folder / "prompts.jsonl"),
        rewards=rewards,
        output_dir=seeing.folder / name,
        data_output_path=str(seeing.folder / "cache"),
        quiet=True,
        **OPTIONS | options,
    )


LANGUAGE = r".*(language|text)_model.*\.(q|k|v|o)_proj"


def save_start(seeing, layers=LANGUAGE, name="start"):
    """An adapter of stock PEFT on the published class, all of whose values are random."""
    path = seeing.folder / name
    if not path.exists():
        stock = AutoModelForImageTextToText.from_pretrained(seeing.base, dtype=torch.float32)
        torch.manual_seed(0)
        adapted = peft.get_peft_model(
            stock, peft.LoraConfig(r=3, lora_alpha=6, target_modules=layers)
        )
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter.data, std=0.05)
        adapted.save_pretrained(path)
    return path


def with_start(seeing, start, **options):
    stock = AutoModelForImageTextToText.from_pretrained(seeing.base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(stock, start, **options).eval()


def plain_losses(seeing, iterations, algorithm, start):
    """(losses, policy) of GRPO or RLOO on given (prompt, tokens), whose prompts stand together."""
    policy, reference = with_start(seeing, start, is_trainable=True), with_start(seeing, start)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
    losses = []
    for responses in iterations:
        inputs = [stock_inputs(seeing, number) for number, _ in responses]
        said = [(each, tokens) for each, (_, tokens) in zip(inputs, responses, strict=True)]
        with torch.no_grad():
            old, before = ([stock_logprobs(m, *each) for each in said] for m in (policy, reference))
        scores = [score_of(tokens) for _, tokens in responses]
        if algorithm == "rloo":
            kl = [(own - ref).sum().item() for own, ref in zip(old, before, strict=True)]
            scores = [score - 0.1 * each for score, each in zip(scores, kl, strict=True)]
        for _ in range(OPTIONS["ppo_epochs"]):
            total = 0.0
            for n, each in enumerate(said):
                twin = scores[n + 1 if n % 2 == 0 else n - 1]
                # Of two: half the gap, by a deviation of the gap over the root of two.
                advantage = scores[n] - twin
                if algorithm == "grpo":
                    advantage = advantage / 2 / (abs(advantage) / 2**0.5 + 1e-4)
                new = stock_logprobs(policy, *each)
                ratio = (new - old[n]).exp()
                terms = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if algorithm == "grpo":
                    gap = before[n] - new
                    terms = terms + 0.1 * (gap.exp() - gap - 1)
                total = total + terms.sum()
            loss = total / sum(len(tokens) for _, tokens in responses)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, policy


def iterations_of(run):
    """(prompt, tokens) of each iteration's responses."""
    responses = {}
    for row in read_rollouts(run.path):
        extra = row["extra"]
        responses.setdefault(row["iteration"], []).append((extra["number"], extra["tokens"]))
    return list(responses.values())


@pytest.fixture(scope="module")
def runs(made):
    """Runs by type and algorithm, which begin with an adapter of stock PEFT."""
    made_runs = {}

    def of(kind, algorithm="grpo"):
        if (kind, algorithm) not in made_runs:
            seeing = made(kind)
            options = {"algorithm": algorithm, "save_interval": 2, "save_total_limit": 0}
            made_runs[kind, algorithm] = train(
                seeing, f"out-{algorithm}", save_start(seeing), **options
            )
        return made_runs[kind, algorithm]

    return of


@pytest.mark.parametrize("kind", spread(smoke=("qwen3_vl",)))
@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.thorough)])
def test_steps_are_those_of_a_plain_loop_in_stock_transformers_and_peft(
    kind, algorithm, made, runs
):
    assert_same_steps(made(kind), runs(kind, algorithm), algorithm, save_start(made(kind)))


def assert_same_steps(seeing, run, algorithm, start):
    iterations = iterations_of(run)
    assert [len(each) for each in iterations] == [12, 12]
    assert all(seeing.media.token_id not in tokens for each in iterations for _, tokens in each)
    losses, policy = plain_losses(seeing, iterations, algorithm, start)
    assert max(map(abs, losses)) > 3e-4
    own = [line["loss"] for line in run.metrics if "loss" in line]
    means = [sum(losses[n : n + 2]) / 2 for n in (0, 2)]  # of an iteration's steps
    assert own == pytest.approx(means, abs=1e-5)
    wanted = peft.get_peft_model_state_dict(policy)
    written = load_file(next(run.path.rglob("adapter_model.safetensors")))
    assert written.keys() == wanted.keys()
    for name, weight in written.items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", spread("qwen3_vl"))
def test_adapters_of_the_tower_train_as_in_the_plain_loop(kind, made):
    seeing = made(kind)
    start = save_start(seeing, "all-linear", "seeing")
    assert_same_steps(seeing, train(seeing, "tower", start), "grpo", start)


@pytest.mark.parametrize("kind", spread("qwen3_vl"))
def test_a_run_that_is_resumed_goes_on_to_the_bit(kind, made, runs):
    seeing, run = made(kind), runs(kind)
    resumed = train(
        seeing,
        "resumed",
        seeing.folder / "start",
        resume=next(run.path.glob("*/step-00000002")),
        save_interval=0,
    )
    assert [each["step"] for each in resumed.record["resumed"]] == [2]
    whole, own = (
        load_file(next((each.path / "actor").rglob("adapter_model.safetensors")))
        for each in (run, resumed)
    )
    assert whole.keys() == own.keys()
    assert all(torch.equal(own[name], weight) for name, weight in whole.items())


def test_features_of_a_picture_are_computed_once_in_a_run(made, monkeypatch):
    seen, see = [], PictureInputs._see
    monkeypatch.setattr(
        PictureInputs,
        "_see",
        lambda self, entries: seen.extend(each.first for each in entries) or see(self, entries),
    )
    train(made("llava_next"), "once")
    assert len(seen) == len(set(seen)) == 3


def test_logs_show_a_picture_once_with_its_path(made, runs, capsys):
    run = runs("qwen3_vl")
    home, rows = made("qwen3_vl").folder, read_rollouts(run.path)
    for row in rows:
        names, _ = PROMPTS[row["extra"]["number"]]
        assert row["prompt"].count("<|image_pad|>") == len(names)
        paths = [str(home / f"{name}.png") for name in names]
        assert [each["path"] for each in row.get("media", [])] == paths
    two = [row for row in rows if row["extra"]["number"] in (0, 1)]
    assert len({row["prompt"] for row in two}) == 1
    # Equal texts with other pictures are other prompts.
    assert "24 responses to 5 prompts in 2 iterations" in summary_text(rows)
    show_rollouts(run.path, RolloutQuery(best=1), json=False)
    assert f"with {home}" in capsys.readouterr().out


SYSTEM = "Answer with a letter."


def documented_rows(home):
    """Rows as TRL's example of GRPO with pictures makes them."""

    def make_conversation(example):
        prompt = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": example["problem"]},
        ]
        return {"prompt": prompt}

    rows = {
        "image": [str(home / "tall.png"), str(home / "wide.png")],
        "problem": ["Which?", "And this?"],
        "solution": ["a", "b"],
    }
    return (
        datasets.Dataset.from_dict(rows)
        .cast_column("image", datasets.Image())
        .map(make_conversation)
    )


def test_trls_documented_example_runs_with_its_rows_and_reward_functions(made):
    seeing, calls = made("llava_next"), []

    def accuracy_reward(completions, solution: list[str], **kwargs):
        calls.append({"completions": completions, "solution": solution, **kwargs})
        contents = [completion[0]["content"] for completion in completions]
        return [float(text == sol) for text, sol in zip(contents, solution, strict=True)]

    def pixels(completions, image):
        return [each.size[0] for each in image]

    rows = documented_rows(seeing.folder)
    run = dschat_lora.rlhf(
        str(seeing.base),
        rows,
        rewards=[accuracy_reward, pixels],
        output_dir=seeing.folder / "documented",
        data_output_path=str(seeing.folder / "cache"),
        quiet=True,
        **OPTIONS
        | {
            "max_steps": 2,
            "per_device_generation_batch_size": 4,
            "per_device_training_batch_size": 4,
        },
    )
    (call,) = calls
    wanted = {row["solution"]: row for row in rows}
    for prompt, own, solution in zip(call["prompts"], call["image"], call["solution"], strict=True):
        row = wanted[solution]
        assert list(own.getdata()) == list(row["image"].getdata())
        assert prompt == [
            {"role": "system", "content": [text(SYSTEM)]},
            {"role": "user", "content": [{"type": "image", "image": own}, text(row["problem"])]},
        ]
    assert {row["rewards"]["pixels"] for row in read_rollouts(run.path)} == {20, 48}


REFUSED = {
    "--rollout_engine http://": {"rollout_engine": "http://127.0.0.1:9"},
    "distillation": {"algorithm": "distill", "teacher_model_name_or_path": "model"},
    "an environment": {"environment": lambda messages, **more: None},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_reads_text_alone_refuses_rows_with_pictures_by_name(what, made):
    seeing, options = made("llava_next"), dict(REFUSED[what])
    if "teacher_model_name_or_path" in options:
        options |= {"teacher_model_name_or_path": str(seeing.base), "rewards": ()}
        options |= {"num_generations": 1}
    with pytest.raises(ValueError, match=f"{what}.* supports text only") as error:
        train(seeing, "refused", **options)
    assert "\n" not in str(error.value)
