"""`dschat-lora audit`: counts and samples of data, and when a run would refuse it."""

import json

import pytest
from audits import audit, data
from transformers import AutoTokenizer

from dschat_lora.addons.audit.config import AuditConfig
from dschat_lora.addons.audit.findings import histogram, sample_html, show_audit
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.options import parse_config
from dschat_lora.report.texts import sample_text
from helpers.attacks import MARKUP, Elements, has_control, seen

__all__ = ["audit", "data"]


@pytest.mark.smoke
def test_counts_and_samples_are_one_json_object(audit, data):
    code, out, _ = audit(data, "--show", 5, "--json")
    found, tokenizer = json.loads(out), AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    first, second = found["samples"]
    prompt, whole = (tokenizer(text)["input_ids"] for text in ("Hello", "Hello good morning"))
    assert whole[: len(prompt)] == prompt
    assert first["input_ids"] == [*whole, tokenizer.eos_token_id]
    assert first["supervised"] == [0] * len(prompt) + [1] * (len(whole) + 1 - len(prompt))
    assert (first["row"], second["row"]) == (f"{data}:1", f"{data}:2")
    said = [i for i, mark in zip(second["input_ids"], second["supervised"], strict=True) if mark]
    assert tokenizer.decode(said) == " b" + tokenizer.eos_token
    counts = found["counts"]
    assert (counts["rows"], counts["samples"], counts["bad"]) == (2, 2, 1)
    assert counts["by_type"] == {"prompt-completion": 1, "conversation": 1}
    assert counts["tokens"] == len(first["input_ids"]) + len(second["input_ids"])
    assert counts["supervised_tokens"] == sum(first["supervised"]) + sum(second["supervised"])
    assert found["refusal"] == "1 row cannot be used; --bad_rows skip continues without them"
    assert code == 1


def test_what_a_run_would_take_ends_with_0_and_can_be_a_page(audit, data, tmp_path):
    page = tmp_path / "audit.html"
    code, out, err = audit(data, "--bad_rows", "skip", "--show", 2, "--html", page)
    assert (code, err) == (0, "")
    assert f"bad row      {data}:3: row lacks 'completion'" in out
    assert "note         a run holds out 5% of the rows" in out
    assert "nothing to evaluate on" not in out
    assert f"{data}:1  sample: " in out
    assert "\n[...]: trained on\n" in out
    assert "[<|end|>]" in out
    assert "<mark>&lt;|end|&gt;</mark>" in page.read_text()


def test_pairs_show_both_answers_and_prompts_nothing_that_is_supervised(audit, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a ", "chosen": "yes", "rejected": "no"}) + "\n")
    code, out, _ = audit(path, "--stage", "dpo", "--show", 1, "--json")
    (pair,) = json.loads(out)["samples"]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert tokenizer.decode(pair["input_ids"]) == "a yes" + tokenizer.eos_token
    assert tokenizer.decode(pair["rejected"]["input_ids"]) == "a no" + tokenizer.eos_token
    assert code == 0
    _, out, _ = audit(path, "--stage", "rlhf", "--show", 1, "--json")
    (prompt,) = json.loads(out)["samples"]
    assert (tokenizer.decode(prompt["input_ids"]), sum(prompt["supervised"])) == ("a ", 0)


def test_answers_that_are_left_out_are_not_shown(audit, tmp_path):
    path = tmp_path / "kto.jsonl"
    rows = [{"prompt": "a", "completion": f" {good}", "label": good} for good in (False, True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = audit(path, "--unpaired_rows", "good_only", "--show", 5, "--json")
    found = json.loads(out)
    assert [sample["row"] for sample in found["samples"]] == [f"{path}:2"]
    assert found["counts"]["samples"] == 1


def test_lengths_of_prompts_and_answers_are_told_apart(audit, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a ", "chosen": "yes", "rejected": "no way"}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    prompt, *answers = (tokenizer(text)["input_ids"] for text in ("a ", "yes", "no way"))
    longer = max(map(len, answers)) + 1
    for stage, answer in (("dpo", longer), ("sft", len(answers[0]) + 1), ("rlhf", 0)):
        _, out, _ = audit(path, "--stage", stage, "--json")
        parts = json.loads(out)["audit"]["part_quantiles"]
        assert [set(parts[name].values()) for name in parts] == [{len(prompt)}, {answer}], stage
    assert "prompt       min" in audit(path)[1]


def test_a_path_that_is_not_there_is_one_line(audit):
    code, out, err = audit("no/such/file.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("error: --data_path no/such/file.jsonl does not exist")
    assert err.count("\n") == 1


def test_supervised_tokens_are_marked_with_and_without_colour():
    tokens, marks = ["a", "\n", "b<", "\x1b"], [0, 0, 1, 1]
    assert sample_text(tokens, marks, colour=False) == "a|\\n|[b<][\\x1b]"
    assert sample_text(tokens, marks, colour=True).startswith("a|\\n|\x1b[1;32mb<\x1b[0m|")
    assert "<span>a</span>" in sample_html(tokens, marks)
    assert "<mark>b&lt;</mark>" in sample_html(tokens, marks)


def test_a_histogram_counts_rows_between_limits():
    lines = histogram({"64": 7, "128": 2}, 10, width=10)
    assert [line.split() for line in lines] == [
        "up to 64 tokens 3 rows ###".split(),
        "up to 128 tokens 5 rows #####".split(),
        "more 2 rows".split(),
    ]


def test_an_audit_of_data_that_is_markup_shows_it_as_text(capsys, tmp_path):
    pages = []
    for number, text in enumerate(("x", MARKUP)):
        data = [{"prompt": f"{text}{n}", "completion": f" {text}"} for n in range(20)]
        data.append({text: text})  # a bad row
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        argv = ["--data_path", str(path), "--html", str(tmp_path / f"{number}.html")]
        show_audit(parse_config(AuditConfig, argv))
        assert not has_control(seen(capsys))
        pages.append(Elements((tmp_path / f"{number}.html").read_text()).found)
    assert pages[1] == pages[0]
