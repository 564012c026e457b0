import json
import re

import pytest

from dschat_lora.addons.nlg.config import EvaluateConfig
from dschat_lora.addons.nlg.evaluate import chosen_metrics, prepared, run_evaluate
from dschat_lora.addons.nlg.predictions import Prediction, cleaner, read_predictions
from dschat_lora.addons.nlg.validation import check_evaluate

LINES = [
    {"meaning": "m", "prediction": "A b .", "references": ["A b .", "c"], "category": "Food"},
    {"meaning": "n", "prediction": "d", "references": ["e f"], "category": "Artist"},
]


def written(tmp_path, lines):
    path = tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_filter_leaves_seen_or_unseen_categories(tmp_path):
    path = written(tmp_path, LINES)
    found = {
        name: [each.text for each in read_predictions(path, name)]
        for name in ("all", "seen", "unseen")
    }
    assert found == {"all": ["A b .", "d"], "seen": ["A b ."], "unseen": ["d"]}


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"prediction": "a"}], {}, "out.jsonl:1: a line has 'prediction' (text) and"),
        (
            [LINES[0], {"prediction": "a", "references": []}],
            {},
            "out.jsonl:2: 'references' must be one text or more, none empty",
        ),
        (
            [{"prediction": "a", "references": ["b"]}],
            {"filter": "seen"},
            "--filter seen needs the category of every meaning",
        ),
        ([LINES[0]], {"filter": "unseen"}, "has no meaning for --filter unseen"),
    ],
)
def test_predictions_that_cannot_be_judged_are_one_clear_line(tmp_path, lines, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_evaluate(EvaluateConfig((written(tmp_path, lines),), **options))


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=re.escape("--predictions gone.jsonl is no file")):
        check_evaluate(EvaluateConfig(("gone.jsonl",)))


def test_profiles_prepare_texts_and_limit_references():
    one = [Prediction("The Cat's 3.5 km.", ("X-Y", "b", "C"), None)]
    assert prepared(one, "e2e", limit=0) == one
    expected = Prediction("the cat ' s 3 . 5 km .", ("x - y", "b"), None)
    assert prepared(one, "webnlg", limit=2) == [expected]


def test_splitting_keeps_underscores_and_letters_of_any_alphabet():
    split_lower = cleaner(tokenize=True, lower=True)
    assert split_lower("A_B, \u00c9t\u00e9 (1)") == "a_b , \u00e9t\u00e9 ( 1 )"


def test_the_table_and_the_file_have_every_metric(tmp_path, capsys):
    path, output = written(tmp_path, LINES), tmp_path / "new" / "metrics.json"
    run_evaluate(EvaluateConfig((path,), profile="dart", output_path=str(output), ref_num=1))
    report = json.loads(output.read_text())
    assert (report["meanings"], report["references"]) == (2, 2)
    assert list(report["metrics"]) == list(chosen_metrics("dart"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 meanings, 2 references, dart, all"
    shown = {each[0]: each[1] for each in (re.split("  +", line.strip()) for line in lines[3:])}
    assert shown == {name: f"{each['value']:.4f}" for name, each in report["metrics"].items()}
    assert [path.name for path in output.parent.iterdir()] == ["metrics.json"]


def test_of_several_files_the_median_and_deviation_are_shown(tmp_path, capsys):
    """BLEU of 100, 0 and 100: median 100, deviation sqrt(2 (100/3)^2 + (200/3)^2) / sqrt(2)."""
    names = []
    for number, text in enumerate(["a b c d", "x", "a b c d"]):
        names.append(str(tmp_path / f"{number}.jsonl"))
        line = {"prediction": text, "references": ["a b c d"]}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(line) + "\n")
    output = tmp_path / "all.json"
    run_evaluate(EvaluateConfig(tuple(names), metrics=("bleu",), output_path=str(output)))
    measure = json.loads(output.read_text())["measures"]["BLEU"]
    assert measure["values"] == pytest.approx([100, 0, 100])
    assert measure["median"] == pytest.approx(100)
    assert measure["deviation"] == pytest.approx(100 / 3**0.5)
    assert "100.0000 +- 57.7350" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --predictions, or --references and --hypotheses"),
        ({"references": "r"}, "--references and --hypotheses go together"),
        ({"references": "r", "hypotheses": "h", "filter": "seen"}, "needs categories"),
        ({"references": "r", "hypotheses": "h"}, "has 2 lines, --references r references of 1"),
        ({"references": "gone", "hypotheses": "h"}, "gone is no file, nor are gone0, gone1"),
        ({"references": "n", "hypotheses": "h", "ref_num": 2}, "n1 has other many lines than n0"),
        ({"references": "n", "hypotheses": "h", "ref_num": 3}, "--references n2 cannot be read"),
    ],
)
def test_text_files_that_do_not_fit_are_named(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"r": "a\nb\n\n", "h": "x\ny\n", "n0": "a\nb\n", "n1": "a\n"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_evaluate(EvaluateConfig(**options))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (r'"\ud83d"', r"'\ud83d' is half a character (a lone surrogate)"),
        ("[" * 5000, "not valid JSON (it is nested too deeply)"),
        ("9" * 5000, "not valid JSON (Exceeds the limit"),
        ('{"a": 1, "a": 2}', "not valid JSON (an object has 'a' twice)"),
    ],
    ids=["half a character", "depth", "digits", "a key twice"],
)
def test_a_prediction_that_cannot_be_scored_is_named_by_its_line(tmp_path, value, reason):
    path = tmp_path / "p.jsonl"
    good = '{"prediction": "a", "references": ["b"]}\n'
    path.write_text(f'{good}{{"prediction": {value}, "references": ["b"]}}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: {reason}")):
        read_predictions(str(path), "all")
