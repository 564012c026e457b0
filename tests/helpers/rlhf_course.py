"""Tiny models for whole runs of step 3, and such runs in the processes of ``Ranks``."""

import asyncio
import json
from contextlib import ExitStack, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from unittest import mock

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.config.options import parse_config
from dschat_lora.engine.distributed import rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.generation import sampling
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.rl.draw import own_engine
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.learn.update import Updater
from dschat_lora.rl.loop import setup, trainer
from dschat_lora.rl.loop import train as course
from dschat_lora.rl.loop.build import build_engines
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.run import open_run
from dschat_lora.runtime.stage_main import exits
from helpers.addons import of_addon
from helpers.runs import release
from helpers.step1 import metrics, write_jsonl
from helpers.tiny import VOCAB, save_tiny_model

# With the three special tokens as many as the tiny models know.
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789", "\u0120", *".,:?!", *"ABCDEFGHIJKLMNOP"]


# ---------------------------------------------------------------------------- what runs begin with


def save_family(kind, directory, layers=2):
    """A base, an actor and a reward model on it, and one of every weight, as stock PEFT saves.

    Factors are those of trained adapters: with zeros, Adam would make steps of rounding.

    Returns:
        ``{name: path}`` of ``base``, ``actor``, ``reward`` (adapters) and ``whole`` (a model).
    """
    directory = Path(directory)
    paths = {name: str(directory / name) for name in ("base", "actor", "reward", "whole")}
    tokenizer = build_byte_tokenizer(letters=LETTERS)
    assert len(tokenizer) == VOCAB
    save_tiny_model(kind, paths["base"], layers)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        policy = AutoModelForCausalLM.from_pretrained(paths["base"])
        _stock_adapter(policy, "CAUSAL_LM").save_pretrained(paths["actor"])
        _scorer(paths["base"]).save_pretrained(paths["whole"])
        _stock_adapter(_scorer(paths["base"]), "SEQ_CLS").save_pretrained(paths["reward"])
    for path in paths.values():
        tokenizer.save_pretrained(path)
    return paths


def _scorer(base):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.config.pad_token_id = 0
    torch.nn.init.normal_(model.score.weight, std=0.3)
    return model


def _stock_adapter(model, task):
    head = {"modules_to_save": ["score"]} if task == "SEQ_CLS" else {}
    config = peft.LoraConfig(
        task_type=task, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **head
    )
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def write_prompts(path, count, *, longest=14, seed=0, chat=False):
    """Prompts of ragged lengths, for a tokenizer of one token a letter."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        letters = torch.randint(0, 26, (size,), generator=generator).tolist()
        rows.append({"prompt": "".join(LETTERS[n] for n in letters), "number": number})
    if chat:
        rows = [{**r, "prompt": [{"role": "user", "content": r["prompt"]}]} for r in rows]
    return write_jsonl(Path(path), rows)


def write_inputs(home, *, chat=False):
    """An actor, its prompts and held-out ones in a directory; the options that name them."""
    models = save_family("opt", home / "opt", layers=1)
    write_prompts(home / "prompts.jsonl", 24, chat=chat)
    write_prompts(home / "held.jsonl", 3, seed=1, chat=chat)
    argv = ["--actor_model_name_or_path", models["actor"], "--data_path", home / "prompts.jsonl"]
    return [*argv, "--eval_data_path", home / "held.jsonl"]


def write_texts(path, count):
    """Pretraining text."""
    rows = [{"text": f"this is text {n}, of some letters: " + "ab" * (n % 7)} for n in range(count)]
    return write_jsonl(Path(path), rows)


def vowels(prompts, responses):
    """A reward that depends on the text: the share of vowels."""
    return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in responses]


def write_turns_template(path):
    """A chat template of few tokens."""
    turn = "{% if m.role == 'user' %}?{{ m.content }}:{% else %}{{ m.content }}</s>{% endif %}"
    Path(path).write_text("{% for m in messages %}" + turn + "{% endfor %}", encoding="utf-8")


def ask_again(responses, rows):
    """An environment: two messages where a response is short, one where it is not, or none."""
    replies = []
    for text, row in zip(responses, rows, strict=True):
        more = {"role": "user", "content": "xyz"[len(text) % 3] + row["prompt"][:1]}
        replies.append([more, more] if len(text) < 2 else more if len(text) % 4 else None)
    return replies


class AskAgain:
    """As :func:`ask_again`, by an object of each episode, which counts its turns."""

    def reset(self, row):
        self.row, self.turns = row, 0

    async def step(self, message):
        self.turns += 1
        (reply,) = ask_again([message["content"]], [self.row])
        return reply


def more_to_say(text, turns):
    """What is said to an answer of an episode with so many; None ends it."""
    return "xyz"[len(text) % 3] if turns < 3 and len(text) % 4 else None


def ask_on(responses, messages):
    """An environment that says :func:`more_to_say`."""
    turns = [sum(each["role"] == "assistant" for each in said) for said in messages]
    more = [more_to_say(text.strip(), n) for text, n in zip(responses, turns, strict=True)]
    return [each and {"role": "user", "content": each} for each in more]


async def asks_on(row, client, model):
    """An agent that plays the episodes of :func:`ask_on`, and scores them by their vowels."""
    messages, more = list(row["prompt"]), ""
    for turn in range(1, 4):
        answer = await client.chat.completions.create(model=model, messages=messages)
        said = answer.choices[0].message
        more = more_to_say(said.content, turn)
        if more is None:
            break
        messages += [said.model_dump(), {"role": "user", "content": more}]
    return vowels([], [said.content])[0]


async def branches(row, client, model):
    """An agent that rewrites its history, asks a helper twice at once, and fails at times."""
    ask = client.chat.completions.create
    question = list(row["prompt"])
    first = (await ask(model=model, messages=question)).choices[0].message.content
    helper = [{"role": "user", "content": "h"}]
    both = await asyncio.gather(*(ask(model=model, messages=helper, max_tokens=3) for _ in "ab"))
    if row["number"] % 5 == 4:
        raise RuntimeError("this one fails")
    found = "".join(each.choices[0].message.content for each in both)
    rewritten = [*question, {"role": "assistant", "content": f"b{first[:2]}"}]
    last = await ask(
        model=model, messages=[*rewritten, {"role": "user", "content": found[:1] or "x"}]
    )
    return {"reward": vowels([], [last.choices[0].message.content])[0], "found": len(found)}


def end_at_once(responses):
    """An environment that has nothing to say."""
    return [None for _ in responses]


# ---------------------------------------------------------------------------- runs


def train_rlhf_many(runs):
    """Several runs after another, as :func:`train_rlhf`."""
    return [train_rlhf(**arguments) for arguments in runs]


def train_rlhf(argv, *, layer_by_layer=False):
    """Step 3 as ``main`` runs it, in the processes at hand; what a test may want to know.

    Args:
        argv: its command line.
        layer_by_layer: decode at ZeRO 3 as where the whole weights do not fit.
    """
    steps, texts = [], []

    class Watched(Updater):
        def queue_steps(self, *args, **kwargs):
            for read in super().queue_steps(*args, **kwargs):
                result = read()
                steps.append(_as_numbers(result))
                yield lambda result=result: result

    def watched(function):
        def call(*args, **kwargs):
            responses = function(*args, **kwargs)
            texts.append([list(each.tokens) for each in responses])
            return responses

        return call

    too_large = mock.patch.object(own_engine, "whole_weights_fit", return_value=False)
    config = check_rlhf(parse_config(RlhfConfig, [str(each) for each in argv]))
    with (
        # The process group is the tests'.
        mock.patch("dschat_lora.runtime.run.init_distributed"),
        mock.patch("dschat_lora.runtime.run.shutdown"),
        mock.patch.object(trainer, "Updater", Watched),
        ExitStack() as stack,
        too_large if layer_by_layer else nullcontext(),
        open_run(config, check=check_rlhf) as run,
    ):
        for each in (Generator, *of_addon("engines.rollouts_ahead:RolloutsAhead")):
            stack.enter_context(mock.patch.object(each, "__call__", watched(each.__call__)))
        ready = setup.set_up(run)
        report = _course(ready, build_engines(ready))
    lines = metrics(config.run.output_dir) if rank() == 0 else []
    return {"steps": steps, "texts": texts, "lines": json.dumps(lines), **report}


def _course(ready, engines):
    roles = ready.models.roles
    frozen = {
        f"{role}.{name}": p
        for role, adapted in roles.models.items()
        for name, p in adapted.model.named_parameters()
        if not p.requires_grad
    }
    before = gather_to_cpu(frozen)
    course.train(ready, engines)
    after = gather_to_cpu(frozen)
    trained = {
        role: gather_to_cpu({n: p for n, p in m.model.named_parameters() if p.requires_grad})
        for role, m in roles.trained.items()
    }
    reference = gather_to_cpu(adapter_parameters(roles.reference.model))
    for engine in engines.trained.values():
        release(engine)
    return {
        "trained": trained,
        "reference": reference,
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
    }


def _as_numbers(result):
    names = "loss policy_loss value_loss text_loss entropy clip_fraction approx_kl".split()
    return {
        **{name: getattr(result, name) for name in names},
        **{f"{role}_norm": outcome.grad_norm for role, outcome in result.outcomes.items()},
        "tokens": result.num_tokens,
    }


def train_rlhf_undrawn(argv, *, places):
    """:func:`train_rlhf` where tokens cannot be drawn: (number of the draw, row) of rollouts."""
    choose, draws = sampling.sample_tokens, []

    def spoilt(logits, uniform, options):
        chosen = choose(logits, uniform, options)
        if options.draws_from_policy and options.max_new_tokens > 1:
            draws.append(1)
            for draw, row in places:
                if draw == len(draws) - 1:
                    chosen[row] = sampling.NO_TOKEN
        return chosen

    with mock.patch.object(sampling, "sample_tokens", spoilt):
        return train_rlhf(argv)


def rlhf_refusal(argv, *, spoil):
    """The line that ends :func:`train_rlhf`, on the first rank, where a weight breaks at its start.

    ``spoil`` is the end of the weight's name.
    """
    train, started = course.train, []

    def spoilt(ready, engines):
        for name, parameter in ready.models.roles.rollout.named_parameters():
            if name.endswith(spoil):
                getattr(parameter, "ds_tensor", parameter).data.view(-1)[0] = torch.nan
        started.append(engines)
        return train(ready, engines)

    with mock.patch.object(course, "train", spoilt), redirect_stderr(StringIO()) as written:
        try:
            exits(train_rlhf)(argv)
        except SystemExit:
            for engine in started[0].trained.values():
                release(engine)
            return written.getvalue()
    return None
