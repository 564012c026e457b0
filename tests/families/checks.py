"""What a family of models must get right, against stock transformers and PEFT.

A check takes a :class:`Family` and returns what it found, in words; it raises what went wrong.
"""

import json
import shutil
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.checkpoint.adapter import read_adapter, write_adapter
from dschat_lora.checkpoint.export import save_merged
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.generation.generate import Decoder, check_cache
from dschat_lora.generation.sampling import Responses, Sampling
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import build_causal_lm, peft_warning
from dschat_lora.models.causal_lm import CausalLMLoss, Policy
from dschat_lora.models.source import find_model
from dschat_lora.rl.learn.engines import Engines, Network, resolve_architecture
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from dschat_lora.supervised.batching import resolve_head, resolve_packing
from helpers import plain
from helpers.kinds import tiny_config
from helpers.launcher import ROOT
from helpers.roles import Words
from helpers.runs import NoTokenizer
from helpers.tiny import VOCAB, ragged_samples

CPU = torch.device("cpu")
PAD, END, RATE, STEPS, ROWS = 1, 2, 5e-3, 3, 4
EXACT = 1e-5  # losses and factors, absolute; logits, of the largest where that is above 1
EPSILON = 1e-4  # of AdamW: a gradient of rounding errors alone then moves nothing
SAMPLED = 1e-4  # log-probabilities of the sampler and of training, nats


class Family:
    """A tiny pretrained model of one type on disk, and what checks have made of it.

    Args:
        kind: the type, as a configuration's ``model_type``.
        directory: of its own, for files.
        launcher: starts commands; None where none are checked.
        others: changes of the configuration.
    """

    def __init__(self, kind, directory, *, launcher=None, others=None):
        self.kind, self.directory, self.launcher = kind, Path(directory), launcher
        self.base = self.directory / "base"
        self.said = []
        config = tiny_config(kind, **(others or {}))
        for name, value in list(vars(config).items()):
            noise = name.endswith(("dropout", "pdrop", "layerdrop", "jitter_noise"))
            if noise and isinstance(value, float):
                setattr(config, name, 0.0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
        model.generation_config.eos_token_id = END
        model.save_pretrained(self.base)
        self.attention = model.config._attn_implementation
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_MODEL / name, self.base)

    def ours(self, adapter=None):
        """Our model with its adapter, as a stage builds it."""
        adapted = build_causal_lm(
            find_model(str(adapter or self.base)),
            Words(),
            ModelConfig(attn_implementation=self.attention),
            LoraConfig() if adapter else LoraConfig(lora_dim=4, lora_alpha=8.0),
            dtype=torch.float32,
            seed=1,
            meta=False,
        )
        self.applied = adapted.lora
        return adapted.model.eval()

    def stock(self, adapter=None):
        """Transformers' model, under PEFT's adapter."""
        model = AutoModelForCausalLM.from_pretrained(self.base).eval()
        if adapter is None:
            return model
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()

    def write(self, model, name):
        """The adapter of our model, as a stage writes it."""
        write_adapter(
            self.directory / name,
            {name: p.detach() for name, p in adapter_parameters(model).items()},
            self.applied,
            layout=adapter_layout(model),
            base_model_name_or_path=str(self.base),
        )
        return self.directory / name

    @cached_property
    def trained(self):
        """Our model after three steps, its losses, the same of PEFT's, and whether it packs."""
        model = self.ours()
        start = self.write(model, "start")
        theirs = self.stock(start)
        # PEFT drops factors of layers that transformers renames, of which to_peft tells.
        own = load_file(start / "adapter_model.safetensors")
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(own[name.replace(".default.", ".")])
        network = CausalLMLoss(model).eval()
        run = SimpleNamespace(
            log=SimpleNamespace(say=self.said.append), record=SimpleNamespace(update=lambda _: None)
        )
        engine = _Engine(network)
        resolve_head(engine, VOCAB, run)
        packs = resolve_packing(engine, True, VOCAB, run)
        windows = [ragged_samples(ROWS, seed=seed, longest=30) for seed in range(STEPS)]
        options = {"rates": [RATE] * STEPS, "max_grad_norm": None, "epsilon": EPSILON}
        wanted, _ = plain.train(theirs, windows, **options)
        parameters = list(adapter_parameters(model).values())
        optimizer = torch.optim.AdamW(
            parameters, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
        )
        losses = []
        for window in windows:
            loss = loss_of(network, [[sample] for sample in window])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        theirs.save_pretrained(self.directory / "theirs")
        check_cache(model)
        return SimpleNamespace(
            model=model, network=network, theirs=theirs, losses=losses, wanted=wanted, packs=packs
        )

    @cached_property
    def adapter(self):
        """Our trained adapter."""
        return self.write(self.trained.model, "trained")

    def command(self, stage, *options):
        """Run a stage on the model; its directory."""
        count = len(list(self.directory.glob("out-*")))
        out = self.directory / f"out-{count}"
        role = "actor_" if stage == "step3_rlhf" else ""
        argv = [f"--{role}model_name_or_path", self.base, "--output_dir", out, *options]
        argv += ["--attn_implementation", self.attention]
        argv += ["--data_path", BUNDLED_DATA["eval"], "--dtype", "fp32"]
        script = ROOT / "training" / stage / "main.py"
        running = self.launcher.start(argv, self.directory, script=script)
        assert running.wait() == [0], _last_line(running.err())
        return out


class _Engine:
    """Stands for an engine around a network on the CPU."""

    device = CPU

    def __init__(self, module):
        self.module = module

    def __call__(self, *inputs):
        return self.module(*inputs)

    def eval(self):
        self.module.eval()


def _last_line(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"


def loss_of(network, rows):
    """Mean loss of our network over the targets of rows of samples."""
    batch = SampleCollator(PAD)(rows)
    total = network(
        batch.input_ids,
        batch.position_ids,
        batch.segment_ids,
        batch.logit_positions,
        batch.target_ids,
        batch.spans,
    )
    return total / batch.num_targets


def _require(error, limit, what):
    """The error in words; refused above the limit, and where it is no number."""
    assert error <= limit, f"{what} differ by {error:.2g}, more than {limit:g}"
    return f"{error:.1e}"


@torch.no_grad()
def logits_of(model, seed=9):
    ids = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=ids, use_cache=False).logits


def sft(family):
    """Three steps equal stock PEFT's, in loss and in every factor."""
    trained = family.trained
    pairs = zip(trained.losses, trained.wanted, strict=True)
    losses = max(abs(ours - theirs) for ours, theirs in pairs)
    words = _require(losses, EXACT, "losses")
    theirs = read_adapter(family.directory / "theirs").tensors
    ours = adapter_parameters(trained.model)
    assert theirs.keys() == ours.keys(), sorted(theirs.keys() ^ ours.keys())[:4]
    factors = max(float((ours[name] - value).abs().max()) for name, value in theirs.items())
    return f"loss {words}, factors {_require(factors, EXACT, 'factors')}"


def packed(family):
    """Packed rows have the loss of the samples alone, or the run says that it does not pack."""
    trained = family.trained
    samples = ragged_samples(6, seed=7)
    if not trained.packs:
        assert any("packing is off" in line for line in family.said)
        rows = [[sample] for sample in samples]
    else:
        rows = [samples[:3], samples[3:]]
    with torch.no_grad():
        loss = float(loss_of(trained.network, rows))
    error = abs(loss - plain.mean_loss(trained.theirs, samples))
    return ("" if trained.packs else "unpacked, ") + _require(error, EXACT, "losses")


PROMPTS = [list(range(3, 3 + size)) for size in (13, 4, 9)]


def greedy(family):
    """Answers of our decoder are those of ``generate``."""
    model, theirs = family.trained.model, family.trained.theirs
    decoder = Decoder(model, eos_ids=[END], pad_id=PAD, device=CPU)
    answers = decoder(PROMPTS, Sampling(9, do_sample=False), seeds=[[0]] * 3).tokens()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        wanted = theirs.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            **{"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END},
        )
        wanted = wanted[0, len(prompt) :].tolist()
        assert answer == wanted, f"answers differ: {answer} and {wanted}"
    return "equal"


def logprobs(family):
    """Several answers to a prompt are sampled as they are scored, and as stock PEFT scores them."""
    model, theirs = family.trained.model, family.trained.theirs
    decoder = Decoder(model, eos_ids=[END], pad_id=PAD, device=CPU)
    seeds = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(len(PROMPTS))]
    drawn = decoder(PROMPTS, Sampling(12), seeds=seeds, keep_logprobs=True)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    responses = [
        Response(tuple(prompt), tuple(tokens), True, number // 3)
        for number, (prompt, tokens) in enumerate(zip(prompts, drawn.tokens(), strict=True))
    ]
    network = Network(actor=Policy(model), reference=Policy(model)).eval()
    run = SimpleNamespace(log=SimpleNamespace(say=family.said.append))
    engines = Engines(_Engine(network), None, None, 1.0)
    engines = resolve_architecture(engines, VOCAB, run)
    batch = collate(
        responses, range(len(responses)), pad_id=PAD, shares_prompts=engines.shares_prompts
    )
    sampler, trainer, stock = 0.0, 0.0, 0.0
    with torch.no_grad():
        table, _ = engines.policy(batch, 12)
        for response, own, kept in zip(responses, table, drawn.logprobs(), strict=True):
            ids = torch.tensor([[*response.prompt, *response.tokens]])
            over = theirs(input_ids=ids).logits[0, len(response.prompt) - 1 : -1].log_softmax(-1)
            said = over.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
            own, kept = own[: len(said)], torch.tensor(kept)
            sampler = max(sampler, float((kept - said).abs().max()))
            trainer = max(trainer, float((own - said).abs().max()))
            stock = max(stock, float((own - kept).abs().max()))
    words = _require(stock, SAMPLED, "log-probabilities of sampler and trainer")
    _require(sampler, SAMPLED, "log-probabilities of sampler and PEFT")
    _require(trainer, SAMPLED, "log-probabilities of trainer and PEFT")
    return words


def merge(family):
    """The merged model is the unmerged one, in stock transformers."""
    model = family.trained.model
    save_merged(
        family.directory / "merged",
        model,
        tokenizer=NoTokenizer(),
        probe_ids=torch.randint(3, VOCAB, (1, 12)),
        max_kl=1e-3,
        dropouts={},
    )
    merged = AutoModelForCausalLM.from_pretrained(family.directory / "merged").eval()
    return _require(_distance(merged, model), EXACT, "logits")


def to_peft(family):
    """Stock PEFT has our logits with our adapter, which are not the base's."""
    dropped = peft_warning(family.trained.model)
    assert dropped is None, dropped
    theirs = family.stock(family.adapter)
    with theirs.disable_adapter():
        moved = _distance(theirs, family.trained.model)
    assert moved > 1e-3, "the adapter has no effect"
    return _require(_distance(theirs, family.trained.model), EXACT, "logits")


def from_peft(family):
    """We have PEFT's logits with an adapter that PEFT wrote."""
    family.trained  # noqa: B018 - writes it
    return _require(
        _distance(family.ours(family.directory / "theirs"), family.trained.theirs), EXACT, "logits"
    )


def _distance(first, second):
    ours, theirs = logits_of(first), logits_of(second)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1))


RL = ("--max_steps", "1", "--max_answer_seq_len", "12", "--eval_prompts", "2")
RL += ("--reward_function", "families.checks:lengths", "--per_device_generation_batch_size", "4")
RL += ("--per_device_training_batch_size", "4", "--max_prompt_seq_len", "40")


def lengths(prompts, responses):
    """A reward function for runs."""
    return [float(len(each)) for each in responses]


def lengths_and_another_sampler(prompts, responses):
    """Likewise, in a process whose sampler says something else of its tokens from then on."""
    own = Responses.logprobs
    Responses.logprobs = lambda self: [[each - 0.3 for each in row] for row in own(self)]
    return lengths(prompts, responses)


def grpo(family):
    """An iteration of GRPO ends, and its sampler is its trainer."""
    return _iteration(family, "--algorithm", "grpo", "--num_generations", "2")


def ppo(family):
    """The same of PPO, with a critic."""
    return _iteration(family, "--critic_lora_dim", "4")


def _iteration(family, *options):
    out = family.command("step3_rlhf", *RL, "--actor_lora_dim", "4", *options)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    error = max(line["sampler_error_max"] for line in lines if "sampler_error_max" in line)
    return _require(error, SAMPLED, "log-probabilities of sampler and trainer")


def resume(family):
    """A run that goes on from a checkpoint writes the adapter of one that was not stopped."""
    options = ("--lora_dim", "4", "--max_steps", "4")
    options += ("--save_interval", "2", "--save_total_limit", "0", "--sample_generations", "0")
    options += ("--max_seq_len", "48", "--per_device_train_batch_size", "2", "--eval_iters", "1")
    whole = family.command("step1_sft", *options)
    (middle,) = (whole / "checkpoints").glob("*2")
    again = family.command("step1_sft", *options, "--resume_from_checkpoint", middle)
    ours, theirs = (
        load_file(each / "adapter" / "adapter_model.safetensors") for each in (again, whole)
    )
    assert ours.keys() == theirs.keys()
    unlike = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not unlike, f"{len(unlike)} tensors differ, such as {unlike[0]}"
    return "equal"


IN_PROCESS = (sft, packed, greedy, logprobs, merge, to_peft, from_peft)
COMMANDS = (grpo, ppo, resume)
