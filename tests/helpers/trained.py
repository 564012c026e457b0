"""Adapters that change what the bundled model says, and verbs that read them."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat_lora import __main__ as command
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from helpers.step1 import write_jsonl

CARD = {"data": {}, "metrics": {}, "versions": {}}
PROMPTS = [
    "\n\nHuman: What is 2 plus 3?\n\nAssistant:",
    "\n\nHuman: I am Leo. Sort these numbers: 1 3 8.\n\nAssistant:",
    "Human",
]
PAIRS = [
    {"prompt": PROMPTS[0], "chosen": " Hello, 2 plus 3 is 5.", "rejected": " 6"},
    {
        "prompt": PROMPTS[1],
        "chosen": " no",
        "rejected": " Hello Leo, the sorted numbers are 1 3 8.",
    },
    {"prompt": PROMPTS[2], "chosen": " one", "rejected": " two three"},
]
NEW_TOKENS = 12


def write_trained(directory):
    """Runs ``sft`` and ``reward``, and files of pairs and of their prompts; returns it."""
    source, config = find_model(None), ModelConfig()
    tokenizer = load_tokenizer(source.tokenizer, config)
    for name, build, task in (
        ("sft", build_causal_lm, "CAUSAL_LM"),
        ("reward", build_reward_model, "SEQ_CLS"),
    ):
        lora = LoraConfig(lora_dim=4, target_modules=("q_proj", "v_proj"))
        more = {"dtype": torch.float32, "seed": 0, "meta": False}
        adapted = build(source, tokenizer, config, lora, **more)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each, parameter in adapted.model.named_parameters():
                if each.endswith("lora_B"):
                    parameter.normal_(std=0.05, generator=generator)
        more = {"base": source.base, "tokenizer": tokenizer, "card": CARD, "task_type": task}
        save_adapter(directory / name / "adapter", adapted.model, adapted.lora, **more)
    write_jsonl(directory / "pairs.jsonl", PAIRS)
    write_jsonl(directory / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return directory


def stock_policy(directory):
    """(model, tokenizer) of the run ``sft`` by PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    model = peft.PeftModel.from_pretrained(base, directory / "sft" / "adapter").eval()
    return model, AutoTokenizer.from_pretrained(directory / "sft" / "adapter")


def stock_scorer(base, adapter=None):
    """``score(prompt, completion)`` by transformers and PEFT alone."""
    tokenizer = AutoTokenizer.from_pretrained(adapter or base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    model.eval()

    @torch.no_grad()
    def score(prompt, completion):
        ids = tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    return score


def greedy(model, tokenizer, prompt):
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, ids["input_ids"].shape[1] :].tolist()


class Verbs:
    """``dschat-lora`` in a directory: its output, or the one line that it ends with."""

    def __init__(self, directory, monkeypatch, capsys):
        self._directory, self._monkeypatch, self._capsys = directory, monkeypatch, capsys

    def run(self, *argv, code=0):
        """What it writes to both streams, once its exit code is ``code``."""
        self._monkeypatch.chdir(self._directory)
        self._monkeypatch.setattr("sys.argv", ["dschat-lora", *map(str, argv)])
        self._capsys.readouterr()
        ended = 0
        try:
            command.main()
        except SystemExit as end:
            ended = end.code
        said = self._capsys.readouterr()
        assert ended == code, said.err
        return said

    def __call__(self, *argv, code=0):
        return self.run(*argv, code=code).out

    def refused(self, *argv):
        """The one line of an exit with code 2."""
        (line,) = self.run(*argv, code=2).err.splitlines()
        return line


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The directory of :func:`write_trained`."""
    return write_trained(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def verb(home, monkeypatch, capsys):
    """:class:`Verbs` in ``home``."""
    return Verbs(home, monkeypatch, capsys)
