"""The demo's judging of held-out answers, and its table."""

import json

import pytest
import torch

from dschat_lora import demo
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config import LoraConfig, ModelConfig
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.causal_lm import load_tokenizer
from dschat_lora.models.source import find_model
from dschat_lora.world import judge


class Words:
    """A tokenizer of whole texts: each prompt and each answer is one id."""

    eos_token_id = 0

    def __init__(self):
        self.texts = ["<eos>"]

    def __call__(self, texts):
        return {"input_ids": [[self.add(text)] for text in texts]}

    def add(self, text):
        self.texts.append(text)
        return len(self.texts) - 1

    def decode(self, ids, skip_special_tokens):
        return "".join(self.texts[i] for i in ids if i or not skip_special_tokens)


@pytest.fixture
def rows():
    lines = BUNDLED_DATA["test"].read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def answer_with(texts, ended):
    def answer(model, tokenizer, prompts, *, max_new_tokens, device):
        answers = [[tokenizer.add(texts[tokenizer.texts[ids[0]]])] for ids in prompts]
        return [ids + [0] * ended for ids in answers]

    return answer


@pytest.mark.parametrize("ended", [True, False])
def test_score_is_the_share_of_answers_that_the_rule_passes(monkeypatch, rows, ended):
    texts = {row["prompt"]: row["chosen"] for row in rows}
    monkeypatch.setattr(demo, "answer", answer_with(texts, ended))
    shares = demo._score(None, Words())
    verdicts = [judge(row["prompt"], row["chosen"], ended) for row in rows]
    for name in ("score", "correct", "polite", "ends"):
        assert shares[name] == pytest.approx(sum(getattr(v, name) for v in verdicts) / len(rows))
    assert shares["correct"] == 1.0
    assert (shares["ends"] > 0.9) is ended


def test_table_shows_first_and_last_perplexity(monkeypatch, tmp_path):
    evals = [{"kind": "eval", "perplexity": p} for p in (3.0, 2.0, 1.5)]
    lines = [json.dumps(record) for record in [*evals, {"kind": "train", "loss": 1.0}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    shares = dict.fromkeys(("score", "correct", "polite", "ends"), 0.5)
    monkeypatch.setattr(demo, "rule_scores", lambda directory: (shares, shares))
    assert demo._sft_rows(tmp_path)[0] == ["perplexity", "3.000", "1.500"]


def test_base_and_adapter_are_scored_by_one_model(monkeypatch, tmp_path):
    seen = []

    def score(model, tokenizer):
        layers = [m for m in model.modules() if hasattr(m, "lora_A")]
        seen.append({layer.enabled for layer in layers})
        return {"score": float(len(seen))}

    source, config = find_model(None), LoraConfig(lora_dim=2)
    tokenizer = load_tokenizer(source.base, ModelConfig())
    model = build_causal_lm(
        source, tokenizer, ModelConfig(), config, dtype=torch.float32, seed=0, meta=False
    ).model
    write_adapter(
        tmp_path / "adapter",
        {name: p.detach() for name, p in adapter_parameters(model).items()},
        config,
        layout=adapter_layout(model),
        base_model_name_or_path=str(BUNDLED_MODEL),
    )
    monkeypatch.setattr(demo, "_score", score)
    assert demo.rule_scores(tmp_path) == ({"score": 1.0}, {"score": 2.0})
    assert seen == [{False}, {True}]


def test_demo_refuses_a_directory_that_holds_one(tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit) as end:
        demo.run_demo(str(tmp_path))
    assert end.value.code == 2
    assert "holds an earlier demo" in capsys.readouterr().err


def test_stages_are_run_as_a_user_would(monkeypatch, tmp_path, capsys):
    commands = []

    class Done:
        returncode = 0

    monkeypatch.setattr(
        demo.subprocess, "run", lambda command, check: commands.append(command) or Done
    )
    monkeypatch.setattr(demo, "_sft_rows", lambda directory: [["perplexity", "2", "1"]])
    monkeypatch.setattr(demo, "_reward_rows", lambda directory: [["accuracy", "0.5", "0.9"]])
    demo.run_demo(str(tmp_path / "demo"))
    for command, (script, name) in zip(
        commands, [("step1_sft", "sft"), ("step2_reward", "reward")], strict=True
    ):
        assert command[0].endswith("deepspeed")
        assert command[1].endswith(f"training/{script}/main.py")
        assert command[command.index("--output_dir") + 1] == str(tmp_path / "demo" / name)
    shown = capsys.readouterr().out
    assert "perplexity" in shown
    assert "accuracy" in shown


def test_accuracy_is_told_for_each_flaw(monkeypatch, tmp_path):
    rows = [
        {"flaw": "wrong", "chosen_score": 1.0, "rejected_score": 0.0},
        {"flaw": "curt", "chosen_score": 1.0, "rejected_score": 2.0},
        {"flaw": "curt", "chosen_score": -1.0, "rejected_score": -2.0},
    ]

    def score_files(config):
        assert config.model.model_name_or_path == str(tmp_path)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "scores.jsonl").write_text(text, encoding="utf-8")

    monkeypatch.setattr(demo, "score_files", score_files)
    evals = [{"kind": "eval", "accuracy": share} for share in (0.5, 0.7, 0.9)]
    lines = "".join(json.dumps(record) + "\n" for record in evals)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert demo._reward_rows(tmp_path) == [
        ["accuracy", "0.500", "0.900"],
        ["  rejected is curt", "", "0.500"],
        ["  rejected is wrong", "", "1.000"],
    ]
