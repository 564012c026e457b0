"""The HTML report: data never becomes markup, nothing is fetched, odd runs are drawn too."""

import gzip
import hashlib
import json
import math
import re
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dschat_lora.addons.report import html as html_module
from dschat_lora.addons.report.curves import MOST_POINTS, chart_data, charts_of, thin
from dschat_lora.addons.report.html import page, render_report
from dschat_lora.addons.report.markup import number, safe
from dschat_lora.addons.report.run_data import RunData, read_run, read_runs
from dschat_lora.addons.report.sections import source_rows
from dschat_lora.config.staging import write_whole
from dschat_lora.report.texts import duration, operations, short
from helpers.attacks import MARKUP, Elements
from helpers.spread import ALL

STYLE = (Path(html_module.__file__).parent / "page" / "report.css").read_text()
ATTACK = (
    "</title></style></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick='x' "
    "&amp; &lt; <!-- ]]> \x00\x1b[31m\x7f\x85\ud800\ufffe\r\n\n\u202e\u05e9\u05dc\u05d5\u05dd "
    "\u0627\u0644\u0633\u0644\u0627\u0645 javascript:alert(1) " + "w" * 3000
)
TAGS = {
    *("html head meta title style script body header h1 h2 h3 h4 nav ul li a main section".split()),
    *("article div table caption thead tbody tr th td figure figcaption small span p i".split()),
    *("details summary bdi mark meter label input select option button".split()),
}
ATTRIBUTES = {
    *("lang charset http-equiv content name id class href dir scope title aria-label role".split()),
    *("aria-hidden tabindex open hidden value type min max step checked".split()),
    *("data-chart data-group data-run".split()),
}
VOID = {"meta", "input"}


class Document(HTMLParser):
    """What a parser sees: elements with attributes, the text, and whether the tags nest."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.open, self.ids = [], "", [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"comment {data!r}")

    def of(self, tag):
        return [attributes for each, attributes in self.elements if each == tag]


def rlhf_run(text="x"):
    """A run with every kind of data, each text in it being ``text``; made by plain loops."""
    facts = {
        "stage": text,
        "status": text,
        "command": ["python3", text],
        "versions": {text: text},
        "platform": text,
        "parameters": {"total": 100, "trainable": 10},
        "config": {"actor_model_name_or_path": text, "seed": text, "kl_coef": 0.05, text: [text]},
        "results": {f"{text} before": text, f"{text} after": 1.5},
        "answers": [
            {"when": when, "prompt": text, "answer": text} for when in ("before", "after", text)
        ],
        "token_losses": [
            {"when": text, "name": text, "tokens": [text], "supervised": [1], "loss": [1.0]}
        ],
        "phases": {
            "generation": {"seconds": 60.0, "flops": 2e12},
            "scoring": {"seconds": 10.0, "flops": 1e12},
            text: {"seconds": 30.0, "flops": 4e12},
        },
        "throughput": {"step_seconds": 1.5, "tokens_per_second": text, "mfu": None},
    }
    train, evals = [], []
    for step in range(1, 31):
        line = {"kind": "train", "step": step, "time": 4.0 * step, "loss": text}
        line |= {"reward": step / 10, "kl": 0.1 * step, "eos_rate": 0.9, "value_loss": 1 / step}
        train.append(line)
        if step % 10 == 0:
            evals.append({"kind": "eval", "step": step, "reward": step / 11, "rule": 0.5, text: 1})
    events = [
        {"kind": "event", "step": 7, "event": "warning", "message": text},
        {"kind": "event", "step": 9, "event": "warning", "message": text},
        {"kind": "event", "step": text, "event": text},
    ]
    return RunData(text, facts, train, evals, events, rollouts_of(text), notes=[text])


def rollouts_of(*prompts):
    """Two iterations of responses to each prompt; that of number n has a reward of n."""
    numbers = enumerate((i, prompt) for i in (1, 2) for prompt in prompts for _ in range(2))
    return [
        {
            "iteration": iteration,
            "prompt": prompt,
            "response": f"{n}: {prompt}",
            "ended": bool(n % 2),
            "rewards": {"rule": n / 2, prompt: n / 2},
            "reward": n,
            "advantage": -n,
            "kl": None,
            "length": n,
        }
        for n, (iteration, prompt) in numbers
    ]


def report_with(text):
    table = (["", text], [[text, text], ["row", "1.5"]])
    return render_report(text, [rlhf_run(text)], {text: table})


def report_of(run):
    html = render_report("a report", [run], {})
    return html, Document(html)


def write_run(directory, record, lines, tail=""):
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(record))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + tail)
    return directory


def data_of(html):
    """The JSON that a page holds for its script."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(text)


def charts_and_lines(**lines):
    """Titles of the charts of a run, and what is said of quantities without one."""
    charts, flat = charts_of([RunData("s", **lines)], 0)
    return [chart.metric.title for chart in charts], flat


# Data and markup.


@pytest.mark.smoke
def test_no_text_changes_the_markup():
    plain, attacked = (Document(report_with(text)) for text in ("x", ATTACK))
    assert [tag for tag, _ in attacked.elements] == [tag for tag, _ in plain.elements]
    names = [[list(attributes) for _, attributes in d.elements] for d in (plain, attacked)]
    assert names[0] == names[1]


def test_the_same_runs_give_the_same_report():
    assert report_with("x") == report_with("x")


def test_only_known_elements_and_attributes_appear():
    document = Document(report_with(ATTACK))
    assert {tag for tag, _ in document.elements} <= TAGS
    assert {name for _, attributes in document.elements for name in attributes} <= ATTRIBUTES


def test_text_is_shown_as_it_is_with_control_characters_made_visible():
    text = Document(report_with(ATTACK)).text
    assert "<script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick='x' &amp;" in text
    assert "\u2400\u241b[31m\u2421\ufffd\ufffd\ufffd\u240d\n\n\u202e\u05e9" in text
    assert "w" * 3000 in text


def test_the_file_can_be_written_whatever_the_text(tmp_path):
    write_whole(tmp_path / "report.html", report_with(ATTACK))
    read = (tmp_path / "report.html").read_bytes()
    assert read.decode("utf-8") == report_with(ATTACK)
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", read)


def test_data_for_the_script_cannot_end_it_and_is_what_it_was():
    html = report_with(ATTACK)
    (text,) = re.findall(r'id="data">(.*?)</script>', html)
    assert not re.search("[<>&\x7f-\U0010ffff]", text)
    assert data_of(html)["rollouts"][0][0]["prompt"] == ATTACK.strip()


@pytest.mark.parametrize("value", ["<", ">", "&", '"', "'"])
def test_safe_text_holds_no_markup(value):
    assert re.fullmatch(r"&#?\w+;", safe(value))


def test_every_prompt_and_message_keeps_its_own_direction():
    document = Document(report_with("x"))
    texts = [attributes for attributes in document.of("div") if attributes.get("class") == "text"]
    assert texts
    assert all(attributes["dir"] == "auto" for attributes in texts)
    assert "unicode-bidi: plaintext" in STYLE


# Self-contained and accessible.


def test_policy_allows_exactly_the_scripts_and_styles_of_the_page():
    html = report_with(ATTACK)
    document = Document(html)
    (policy,) = [m["content"] for m in document.of("meta") if "http-equiv" in m]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    blocks = {
        "script-src": re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL),
        "style-src": re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL),
    }
    assert [len(each) for each in blocks.values()] == [2, 1]
    for rule, texts in blocks.items():
        hashes = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules.pop(rule) == " ".join(f"'sha256-{each}'" for each in hashes)
    assert rules.pop("img-src") == "data:"
    assert rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    tags = [tag for tag, _ in document.elements]
    assert tags[:4] == ["html", "head", "meta", "meta"]  # before any content


def test_a_page_without_data_has_no_script():
    html = page("t", "<p>x</p>")
    assert "<script" not in html
    assert "script-src 'none'" in html


def test_nothing_is_fetched():
    html = report_with("x")
    links = [attributes["href"] for attributes in Document(html).of("a")]
    assert all(link.startswith("#") for link in links)
    # The library says where it comes from, in a comment.
    html = html.replace("/*! https://github.com/leeoniya/uPlot", "")
    for way in ("http:", "https:", "url(", "@import", "src=", "<link", "<iframe", "fetch("):
        assert way not in html


def test_ids_are_unique_and_every_link_is_met():
    runs = [rlhf_run("same"), rlhf_run("same"), RunData("other")]
    document = Document(render_report("t", runs, {}))
    assert len(set(document.ids)) == len(document.ids)
    assert {"summary", "stage-0", "stage-1", "answers", "time"} <= set(document.ids)
    for attributes in document.of("a"):
        assert attributes["href"].removeprefix("#") in document.ids


def test_every_chart_says_in_words_and_numbers_what_it_shows():
    lines = [{"step": step, "loss": loss} for step, loss in enumerate([0.5, 3.0, 2.0], 1)]
    html, document = report_of(RunData("sft", train=lines))
    (plot,) = [each for each in document.of("div") if each.get("role") == "img"]
    assert plot["aria-label"] == ("Loss. training: 0.5 at step 1, 2 at step 3, between 0.5 and 3.")
    (row,) = re.findall(r"<tr><th scope=\"row\">Loss, training</th>(.*?)</tr>", html)
    assert re.findall("<td>(.*?)</td>", row) == ["0.5", "2", "0.5", "1", "3", "2"]


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """WCAG 2.2: the ratio of relative luminances."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colors_have_enough_contrast(scheme):
    colors = {}
    roots = re.findall(r":root \{(.*?)\}", STYLE, flags=re.DOTALL)
    assert len(roots) == 2
    colors |= dict(re.findall(r"--(\w+): (#\w+)", roots[scheme]))
    for name in ("text", "muted", "warning", "link", "good", "doubt"):
        assert contrast(colors[name], colors["page"]) >= 4.5
        assert contrast(colors[name], colors["panel"]) >= 4.5
    for name in ("c0", "c1", "c2", "c3", "c4", "c5"):
        assert contrast(colors[name], colors["page"]) >= 3


# Curves.


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", math.nan, math.inf, 1e300, 10**400, True])
def test_what_is_no_finite_number_is_a_gap(bad):
    values = [1.0, 2.0, bad, 3.0, 4.0]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values)]
    html, document = report_of(RunData("sft", train=lines))
    ((curve,),) = (chart["curves"] for chart in data_of(html)["charts"])
    assert (curve["x"], curve["y"]) == ([0, 1, 2, 3, 4], [1, 2, None, 3, 4])
    assert "training: 1 of 5 values not finite" in document.text


def test_a_curve_without_any_value_is_left_out():
    assert charts_and_lines(train=[{"step": 1, "loss": "nan"}, {"step": 2}]) == ([], [])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([2.0] * 50, "KL coefficient: 2"),
        ([2.0, 2.0 + 1e-9, 2.0], "KL coefficient: 2"),
        ([0.5], "KL coefficient: 0.5"),
        ([1.0, 3.0], "KL coefficient: 1 \u2192 3"),
    ],
)
def test_a_curve_that_shows_nothing_is_a_line_of_text(values, words):
    lines = [{"step": step, "kl_coef": value} for step, value in enumerate(values)]
    assert charts_and_lines(train=lines) == ([], [words])


def test_rounding_around_zero_is_no_curve():
    lines = [{"step": step, "policy_loss": (-1) ** step * 3e-9} for step in range(10)]
    assert charts_and_lines(train=lines) == ([], ["Policy loss: 0 but for rounding"])


def test_runs_of_a_stage_share_charts_and_constants_of_each_are_told():
    def run(name, coefficient):
        lines = [{"step": s, "reward": coefficient * s, "kl_coef": coefficient} for s in range(3)]
        return RunData("rlhf", {"config": {"seed": coefficient, "lam": 1}}, lines, label=name)

    html, document = report_of(run("a", 1.0))
    assert "Options that differ" not in document.text
    html = render_report("t", [run("a", 1.0), run("b", 2.0)], {})
    (chart,) = data_of(html)["charts"]
    assert [curve["name"] for curve in chart["curves"]] == ["a, training", "b, training"]
    assert [curve["y"] for curve in chart["curves"]] == [[0, 1, 2], [0, 2, 4]]
    text = Document(html).text
    assert "KL coefficient: a, training 1, b, training 2" in text
    assert "Options that differoptionabseed12" in text


def test_bands_are_the_recorded_standard_errors_and_binomial_ones_of_accuracies():
    evals = [
        {"step": 0, "reward": 1.0, "reward_standard_error": 0.25, "accuracy": 0.5, "samples": 100},
        {"step": 1, "reward": 2.0, "accuracy": 0.9, "samples": 100},
        {"step": 2, "reward": 3.0, "reward_standard_error": 0.5, "accuracy": 1.0, "samples": 100},
    ]
    charts, _ = charts_of([RunData("rlhf", evals=evals)], 0)
    curves = {chart.metric.title: chart.curves[0] for chart in charts}
    assert [str(error) for error in curves["Reward"].errors] == ["0.25", "nan", "0.5"]
    assert curves["Pairs ranked rightly"].errors == pytest.approx((5.0, 3.0, 0.0))  # percent
    (reward, _) = chart_data(charts[::-1])
    assert reward["curves"][0]["e"] == [0.25, None, 0.5]


def test_thinning_keeps_ends_extremes_and_gaps():
    values = [math.sin(step / 37) for step in range(20_000)]
    values[7_777], values[3_333], values[12_345] = 50.0, -50.0, math.nan
    kept = thin(values, 400)
    assert len(kept) <= 400
    assert {0, 3_333, 7_777, 12_345, 19_999} <= set(kept)
    assert sum(math.isnan(values[n]) for n in kept) == 1
    assert kept == sorted(set(kept))
    assert thin(values[:400], 400) == list(range(400))


def test_many_long_runs_stay_under_two_megabytes():
    names = ("loss", "reward", "kl", "entropy", "response_length", "grad_norm", "value_loss")
    lines = [
        {"step": step} | {name: math.sin(step * n) + step / 7 for n, name in enumerate(names, 1)}
        for step in range(1600)
    ]
    rows = rollouts_of(*(f"{n} " + "p" * 20_000 for n in range(20)))
    rows = [{**row, "rewards": {"rule": 1.0}} for row in rows]
    runs = [RunData("rlhf", train=lines, rollouts=rows, label=f"run {n}") for n in range(4)]
    html = render_report("t", runs, {})
    assert len(html.encode()) < 2_000_000
    points = sum(len(c["x"]) for chart in data_of(html)["charts"] for c in chart["curves"])
    assert 0.5 * MOST_POINTS < points <= MOST_POINTS


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.10834, "1.108"),
        (12345.6, "12,346"),
        (1e-5, "1.00e-05"),
        (2.5e8, "2.50e+08"),
        (number(None), "-"),
    ],
)
def test_numbers_have_about_four_digits(value, expected):
    assert short(value) == expected


# Stages.


def test_the_curves_of_each_stage_are_drawn_under_names_a_person_knows():
    def titles(train, evals):
        steps = (1, 2, 3)
        train = [{"step": s, **{name: s * v for name, v in train.items()}} for s in steps]
        return charts_and_lines(
            train=train, evals=[{"step": s, **{n: s * v for n, v in evals.items()}} for s in steps]
        )[0]

    assert titles({"loss": 1.0}, {"loss": 1.0, "perplexity": 3.0}) == [
        "Loss",
        "Held-out perplexity",
    ]
    pair = {"loss": 1.0, "accuracy": 0.2, "margin": 0.1}
    assert titles(pair, pair) == ["Loss", "Pairs ranked rightly", "Margin"]
    fields = """reward kl kl_coef policy_loss value_loss entropy clip_fraction approx_kl
        explained_variance response_length eos_rate truncated_fraction""".split()
    drawn = titles(dict.fromkeys(fields, 0.25), {"rule_score": 0.5, "tokens": 5})
    assert len(drawn) == len(fields) + 1
    assert drawn[-1] == "Held-out rule score"
    # Those that are folded come last.
    assert titles({"kl_coef": 1.0, "entropy": 1.0}, {}) == [
        "Entropy of the policy",
        "KL coefficient",
    ]


def test_shares_are_drawn_in_percent():
    lines = [{"step": step, "accuracy": share} for step, share in enumerate([0.5, 0.6, 0.975])]
    html, _ = report_of(RunData("reward", train=lines))
    (chart,) = data_of(html)["charts"]
    assert (chart["percent"], chart["curves"][0]["y"]) == (True, [50, 60, 97.5])


def test_warnings_are_listed_once_with_their_steps_and_marked_in_the_charts():
    train = [{"step": step, "reward": 1.0 * step} for step in range(1, 101)]
    events = [{"event": "warning", "step": step, "message": "KL is high"} for step in range(20, 27)]
    events.append({"event": "skipped_step", "step": 50})
    html, document = report_of(RunData("rlhf", train=train, events=events))
    assert document.text.count("KL is high") == 1
    assert "step 20, 21, 22, 23, 24, ... (7 times)" in document.text
    assert "Skipped_step step 50" in document.text
    assert data_of(html)["charts"][0]["marks"] == list(range(20, 27))


def test_ten_thousand_different_warnings_stay_readable():
    events = [{"event": "warning", "step": i, "message": f"message {i}"} for i in range(10_000)]
    _, document = report_of(RunData("rlhf", events=events))
    assert "and 9,950 more in metrics.jsonl" in document.text


def test_tokens_are_shaded_by_loss_and_marked_where_they_are_trained_on():
    """Shades begin at 0.1, 0.7, 2 and 4 nats."""
    row = {"name": "", "tokens": ["<a>", " b", "c"], "supervised": [0, 1, 1]}
    rows = [
        {**row, "when": "before", "loss": [None, 4.5, 0.05]},
        {**row, "when": "after", "loss": [None, 0.8, "nan"]},
    ]
    html, _ = report_of(RunData("sft", {"token_losses": rows}))
    (shown,) = re.findall(r"<summary>Loss of each token.*?</details>", html, re.S)
    assert shown.count("<span>&lt;a&gt;</span>") == 2
    assert '<mark class="down4" title="loss 4.5" tabindex="-1"> b</mark>' in shown
    assert '<mark class="down2" title="loss 0.8" tabindex="-1"> b</mark>' in shown
    assert '<mark title="loss 0.05" tabindex="-1">c</mark>' in shown
    assert '<mark class="down4" title="loss nan" tabindex="-1">c</mark>' in shown
    assert shown.index(">before<") < shown.index(">after<")


@pytest.mark.parametrize(
    "changed", [{"loss": [1.0]}, {"loss": ["1", 2.0]}, {"tokens": [1, "b"]}, {"supervised": 1}]
)
def test_token_losses_that_cannot_be_read_are_left_out(changed):
    row = {"when": "after", "tokens": ["a", "b"], "supervised": [0, 1], "loss": [None, 2.0]}
    html, _ = report_of(RunData("sft", {"token_losses": [{**row, **changed}, "text"]}))
    assert "Loss of each token" not in html


def test_answers_to_one_prompt_stand_side_by_side():
    answers = [
        {"when": when, "prompt": prompt, "answer": f" {when} {prompt}"}
        for when in ("before", "after")
        for prompt in ("one", "two")
    ]
    answers.append({"when": "before", "prompt": "three", "answer": ""})
    html, _ = report_of(RunData("sft", {"answers": answers}))
    samples = html.split("<main>")[1].split('<div class="sample">')[1:]
    texts = [re.findall(r'<div class="text" dir="auto">(.*?)</div>', each) for each in samples]
    assert texts[0] == ["one", "before one", "after one"]
    assert texts[1] == ["two", "before two", "after two"]
    assert texts[2] == ["three", "(empty)"]


def test_the_best_worst_and_most_changed_responses_of_training_are_shown():
    rows = rollouts_of(*(f"p{n}" for n in range(6)))
    html, document = report_of(RunData("rlhf", rollouts=rows))
    assert "24 responses to 6 prompts in 2 iterations" in document.text
    assert "mean reward 5.5 in the first, 17.5 in the last" in document.text
    best, worst, changed = (
        re.findall(r'<div class="text" dir="auto">(\d+): (\w+)</div>', part)
        for part in html.split("<details><summary>")[1:4]
    )
    assert [int(n) for n, _ in best] == [23, 22, 21, 20, 19]
    assert [int(n) for n, _ in worst] == [0, 1, 2, 3, 4]
    # The best of the first and of the last iteration; all changed by 12.
    assert changed == [(str(2 * n + 1 + 12 * i), f"p{n}") for n in range(5) for i in (0, 1)]
    assert "iteration 2  reward 23 (rule 11.5, p5 11.5)" in document.text


@pytest.mark.parametrize(
    "broken", ["[]", "{}", '{"prompt": 1}', json.dumps({**rollouts_of("p")[0], "reward": "much"})]
)
def test_responses_that_cannot_be_read_are_noted(tmp_path, broken):
    run = write_run(tmp_path / "run", {"stage": "rlhf"}, [])
    (run / "rollouts.jsonl.gz").write_bytes(gzip.compress(broken.encode()))
    _, document = report_of(read_run(run))
    assert "rollouts.jsonl.gz holds no responses of a run" in document.text


def test_settings_that_matter_come_first_and_the_others_are_folded_again():
    config = {
        "lora_learning_rate": 1.5e-3,
        "lora_dim": 16,
        "seed": 1234,
        "adam_epsilon": 1e-8,
        "print_loss": False,
    }
    facts = {"config": config, "versions": {"torch": "2.13.0"}, "world_size": 2}
    facts["learns"] = {"model": {"words": "q_proj of 2 layers; frozen: norms"}, "other": 1}
    html, _ = report_of(RunData("sft", facts))
    _, first, second = html.split('<section id="stage-0">')[1].split("<details>")
    shown = ("lora_learning_rate", "0.0015", "lora_dim", "1234", "torch 2.13.0")
    for text in (*shown, "learns (model)", "q_proj of 2 layers; frozen: norms"):
        assert text in first
    assert "print_loss" in second
    assert "1e-08" in second
    assert "print_loss" not in first


def test_summary_tells_what_was_trained_and_holds_the_given_tables():
    facts = {
        "status": "finished",
        "config": {"model_name_or_path": None, "lora_dim": 8},
        "parameters": {"total": 1_300_000_000, "trainable": 13_000_000},
        "results": {"bleu before": 1.2577, "bleu after": 1.1083, "share": 0.5, "a after": "x"},
    }
    run = RunData("nlg", facts, train=[{"step": 146, "time": 27.0, "epoch": 2.0}])
    tables = {"held-out rows": (["", "before", "after"], [["rule score", "0.000", "0.807"]])}
    text = Document(render_report("t", [run], tables)).text.split("Cost")[1]
    for part in (
        "LoRA of rank 8 on the bundled tiny model (13,000,000 of 1,300,000,000 parameters)",
        "146 optimizer steps, 2 epochs",
        "It took 27 s",
        "bleu: 1.258 \u2192 1.108",
        "share: 0.5",
        "a after: x",
        "Nothing looks wrong.",
        "held-out rowsbeforeafterrule score0.0000.807",
    ):
        assert part in text


def test_a_report_without_stages_has_its_tables():
    document = Document(render_report("t", [], {"results": (["a"], [["b"], [], ["c", "d", "e"]])}))
    assert "resultsabcde" in document.text


# Time and operations.


STEPS = [
    {"step": 1, "time": 3.0, "step_seconds": 2.0, "tflops_per_device": 0.5},
    {"step": 2, "time": 7.0, "step_seconds": 1.0, "tflops_per_device": "nan"},
    {"step": 3, "time": 10.0, "step_seconds": 4.0, "tflops_per_device": 0.25},
]
TIMES = {"generation_seconds": 2.0, "scoring_seconds": 0.5, "training_seconds": 1.0}


@pytest.mark.parametrize(
    ("facts", "train", "phases"),
    [
        ({"world_size": 2}, STEPS, {"training": (7.0, 4e12), "evaluation and other": (3.0, 0.0)}),
        (
            {"phases": {"generation": {"seconds": 60, "flops": 1e12}, "training": {"seconds": 30}}},
            [{"step": 1, "time": 100.0}],
            {"generation": (60, 1e12), "training": (30, 0.0), "evaluation and other": (10, 0.0)},
        ),
        (
            {},
            [TIMES] * 3,
            {"generation": (6.0, 0.0), "scoring": (1.5, 0.0), "training": (3.0, 0.0)},
        ),
    ],
    ids=["sums over steps", "as run.json says", "of an interrupted run"],
)
def test_time_and_operations_of_phases(facts, train, phases):
    found = RunData("s", facts, train=train).phases
    assert {name: pytest.approx(each) for name, each in found.items()} == phases


def test_bars_are_shares_of_their_stage():
    phases = {"generation": {"seconds": 30.0, "flops": 6e12}, "training": {"seconds": 10.0}}
    _, document = report_of(RunData("rlhf", {"phases": phases}))
    assert [(m["aria-label"], m["value"]) for m in document.of("meter")] == [
        ("rlhf: generation", "0.7500"),
        ("rlhf: training", "0.2500"),
    ]
    assert "30 s75.0%6 TFLOP200 GFLOP/s" in document.text


def test_memory_is_shown_as_estimated_and_as_measured():
    facts = {"memory": {"weights": 2**30, "peak": 3 * 2**30, "keeps_cache": True}}
    lines = [{"step": 1, "peak_memory_bytes": 2 * 2**30}, {"step": 2, "peak_memory_bytes": 2**32}]
    html, _ = report_of(RunData("rlhf", facts, train=lines))
    (row,) = re.findall(r"<h3>Memory</h3>.*?<tbody>(.*?)</tbody>", html)
    assert re.findall("<td>(.*?)</td>", row) == ["1", "3", "4", "75%"]


def test_data_tells_the_fate_of_rows():
    audit = {
        "rows_by_type": {"preference": 90, "messages": 10},
        "train_rows": 100,
        "train_samples": 80,
        "tokens": 5000,
        "supervised_tokens": 1000,
        "dropped_rows": 20,
        "duplicate_rows": 0,
        "bad_rows": 1,
        "bad_row_examples": ["data.jsonl:3: " + ATTACK],
        "length_quantiles": {"min": 3, "max": 200},
        "longer_rows": {"64": 60, "128": 10},
        "left_out": {"tools, by the chat template": 4000},
    }
    _, document = report_of(RunData("sft", {"data": {"audit": audit}}))
    for part in (
        "90 preference, 10 messages",
        "100 rows, 80 samples, 5,000 tokens",
        "1,000 (20.0% of the tokens)",
        "20 rowsdropped: longer than the limit",
        "20 of 100 training rows were dropped or cut",
        "data.jsonl:3: </title>",
        "up to 64 tokens40 rows",
        "up to 128 tokens50 rows",
        "more10 rows",
        "4,000 rowsleft out: tools, by the chat template",
    ):
        assert part in document.text
    assert "repeat an earlier row" not in document.text


def test_sources_of_a_mixture_have_a_row_each():
    steps = [(3, 1, 30, 90), (4, 0, 50, 0), (2, 2, 20, 10)]
    train = [
        {"step": n, "samples/a": a, "samples/b": b, "tokens/a": s, "tokens/b": t, "epochs/a": n / 2}
        for n, (a, b, s, t) in enumerate(steps, start=1)
    ]
    train[0] |= {"loss/a": 4.0, "loss/b": None}
    train[1] |= {"loss/a": 3.5, "loss/b": 2.25}
    evals = [{"step": 0, "loss/a": 2.5, "loss/b": 3.0}, {"step": 3, "loss/a": 1.25}]
    config = {"data_path": ["no/a:9", "no/b:1"], "mixture_temperature": 2.0}
    run = RunData("sft", {"config": config}, train=train, evals=evals)
    # Square roots of 9 and 1 are as 3 to 1; 9 of 12 samples were of a.
    assert source_rows(run) == [
        ["a", "75.0%", "75.0%", "100", "1.5", "4", "3.5", "2.5", "1.25"],
        ["b", "25.0%", "25.0%", "100", "-", "2.25", "2.25", "3", "3"],
    ]
    _, document = report_of(run)
    assert "b25.0%25.0%100-2.252.2533" in document.text
    without = replace(run, facts={"config": {"data_path": ["no/a", "no/b"]}}, evals=[])
    assert [row[1:3] + row[7:] for row in source_rows(without)] == [
        ["-", "75.0%", "-", "-"],
        ["-", "25.0%", "-", "-"],
    ]
    _, document = report_of(RunData("sft", train=[{"step": 1, "samples/a": 3}]))
    assert "share of samples" not in document.text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(2.163, "2.16 s"), (90.0, "1.5 min"), (3600.0, "1 h 0 min"), (9000.0, "2 h 30 min")],
)
def test_durations_in_words(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("flops", "expected"),
    [(0.0, "-"), (5e6, "5 MFLOP"), (1.25e9, "1.25 GFLOP"), (3e15, "3 PFLOP"), (7e18, "7 EFLOP")],
)
def test_operations_in_words(flops, expected):
    assert operations(flops) == expected


# Files.


def test_run_data_hold_what_the_run_left(tmp_path):
    record = {"stage": "sft", "config": {"seed": 1}, "throughput": {"steps": 3}}
    lines = [
        {"kind": "eval", "step": 0, "time": 0.5, "perplexity": 2.0},
        {"kind": "train", "step": 1, "time": 1.5, "loss": "nan"},
        {"kind": "event", "step": 1, "time": 1.5, "event": "warning", "message": "m"},
    ]
    run = read_run(write_run(tmp_path / "run", record, lines))
    assert run.name == "sft"
    assert (run.config, run.part("throughput")) == ({"seed": 1}, {"steps": 3})
    assert (run.train, run.evals, run.events) == ((lines[1],), (lines[0],), (lines[2],))
    assert run.seconds == 1.5
    assert run.notes == ()


def test_a_torn_last_line_is_told_and_the_others_are_drawn(tmp_path):
    lines = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "train", "step": 2, "loss": 1.0}]
    path = write_run(tmp_path / "run", {"stage": "sft"}, lines, tail='{"kind": "train", "st')
    run = read_run(path)
    assert len(run.train) == 2
    _, document = report_of(run)
    assert "Loss: 2 \u2192 1" in document.text
    assert f"{path / 'metrics.jsonl'}: lines that cannot be read: 1" in document.text


def test_missing_files_are_told(tmp_path):
    run = read_run(tmp_path / "rlhf")
    _, document = report_of(run)
    assert run.name == "rlhf"
    assert f"{tmp_path / 'rlhf' / 'run.json'} does not exist" in document.text
    assert f"{tmp_path / 'rlhf' / 'metrics.jsonl'} does not exist" in document.text
    assert "No curves: no metrics." in document.text


def test_runs_are_called_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    runs = [tmp_path / "one" / "rlhf", tmp_path / "two" / "rlhf"]
    assert [run.label for run in read_runs(runs)] == ["one/rlhf", "two/rlhf"]
    assert [run.label for run in read_runs(runs[:1])] == ["rlhf"]


def test_checkpoints_on_the_disk_are_told_with_their_sizes(tmp_path):
    run = write_run(tmp_path / "run", {"checkpoints": {"saved": 3}}, [])
    for step in (10, 20):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step:08d}" / "state").write_bytes(bytes(step * 2**20))
    _, document = report_of(read_run(run))
    assert "3 saved; on the disk: step-00000010 (10.0 MiB), step-00000020 (20.0 MiB)" in (
        document.text
    )


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00", b"[1, 2]\nnull\n3\n"])
def test_files_without_any_object_are_told(tmp_path, content):
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(content)
    _, document = report_of(read_run(tmp_path))
    assert "run.json is no JSON object" in document.text
    assert "metrics.jsonl has no lines" in document.text


def leaves(value, path=()):
    """The path of each value, of lists the first two alone."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for name, part in parts if isinstance(value, dict | list) else ():
        if isinstance(part, dict | list):
            yield from leaves(part, (*path, name))
        else:
            yield (*path, name)


def changed(value, path, new):
    """``value`` with ``new`` in place of what lies at ``path``."""
    if not path:
        return new
    name, *rest = path
    parts = dict(value) if isinstance(value, dict) else list(value)
    parts[name] = changed(parts[name], rest, new)
    return parts


ODD = [
    MARKUP,
    {MARKUP: MARKUP},
    [MARKUP],
    -1,
    1e308,
    math.nan,
    10**400,
    True,
    None,
    [],
    {},
    [[1]],
    "nan",
]


def test_a_report_shows_whatever_stands_in_place_of_a_value(tmp_path):
    run, rolled = rlhf_run(), rollouts_of("a", "b")
    lines = [dict(each) for each in (run.train[0], run.evals[0], run.events[0])]
    cases = [("run", path, odd) for path in leaves(dict(run.facts)) for odd in ODD]
    cases += [("lines", path, odd) for path in leaves(lines) for odd in ODD]
    cases += [("rolled", path, odd) for path in leaves(rolled) for odd in ODD]
    allowed = TAGS | {(tag, name) for tag in TAGS for name in ATTRIBUTES}
    for what, path, odd in cases if ALL else cases[::40]:
        files = {"run": dict(run.facts), "lines": lines, "rolled": rolled}
        files[what] = changed(files[what], path, odd)
        (tmp_path / "run.json").write_text(json.dumps(files["run"]))
        for name in ("lines", "rolled"):
            files[name] = files[name] if isinstance(files[name], list) else [files[name]]
        text = "".join(json.dumps(line) + "\n" for line in files["lines"])
        (tmp_path / "metrics.jsonl").write_text(text)
        text = "".join(json.dumps(line) + "\n" for line in files["rolled"])
        (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1))
        found = Elements(render_report("t", read_runs([tmp_path]), {})).found
        assert found <= allowed, (what, path, odd)
