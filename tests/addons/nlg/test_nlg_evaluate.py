import json
import re

import pytest

from dschat_lora.addons.nlg.config import EvaluateConfig
from dschat_lora.addons.nlg.evaluate import chosen_metrics, prepared, run_evaluate
from dschat_lora.addons.nlg.predictions import Prediction, read_predictions

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
    texts = {
        name: [each.text for each in read_predictions(path, name)]
        for name in ("all", "seen", "unseen")
    }
    assert texts == {"all": ["A b .", "d"], "seen": ["A b ."], "unseen": ["d"]}


def test_profiles_prepare_texts_and_limit_references():
    one = [Prediction("The Cat's 3.5 km.", ("X_Y", "\u00c9t\u00e9-(1)", "C"), None)]
    assert prepared(one, "e2e", limit=0) == one
    expected = Prediction("the cat ' s 3 . 5 km .", ("x_y", "\u00e9t\u00e9 - ( 1 )"), None)
    assert prepared(one, "webnlg", limit=2) == [expected]


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
