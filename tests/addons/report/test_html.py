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
from dschat_lora.addons.report.markup import number
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
    *("details summary noscript bdi mark meter label input select option button".split()),
}
ATTRIBUTES = {
    *("lang charset http-equiv content name id class href dir scope title aria-label role".split()),
    *("aria-hidden tabindex open hidden value type min max step checked".split()),
    *("data-chart data-group data-run".split()),
}


class Document(HTMLParser):
    """What a parser sees: elements with attributes, the text, and whether the tags nest."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.open = [], "", []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

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
        **{"stage": text, "status": text, "command": ["python3", text], "platform": text},
        "versions": {text: text},
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
    warning = {"kind": "event", "event": "warning", "message": text}
    events = [{**warning, "step": step} for step in (7, 9)]
    events.append({"kind": "event", "step": text, "event": text})
    return RunData(text, facts, train, evals, events, rollouts_of(text), notes=[text])


def rollouts_of(*prompts):
    """Two iterations of responses to each prompt; that of number n has a reward of n."""
    numbers = enumerate((i, prompt) for i in (1, 2) for prompt in prompts for _ in range(2))
    return [
        {
            **{"iteration": iteration, "prompt": prompt, "response": f"{n}: {prompt}"},
            **{"ended": bool(n % 2), "rewards": {"rule": n / 2, prompt: n / 2}},
            **{"reward": n, "advantage": -n, "kl": None, "length": n},
        }
        for n, (iteration, prompt) in numbers
    ]


def report_with(text):
    table = (["", text], [[text, text], ["row", "1.5"]])
    return render_report(text, [rlhf_run(text)], {text: table})


def report_of(*runs, tables=None):
    html = render_report("a report", runs, tables or {})
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


def cells(row):
    return re.findall("<td>(.*?)</td>", row)


def charts_and_lines(**lines):
    """Titles of the charts of a run, and what is said of quantities without one."""
    charts, flat = charts_of([RunData("s", **lines)], 0)
    return [chart.metric.title for chart in charts], flat


# Data and markup.


@pytest.fixture(scope="module")
def attacked():
    """A report whose every text is an attack, and what a parser sees of it."""
    html = report_with(ATTACK)
    return html, Document(html)


@pytest.mark.smoke
def test_no_text_changes_the_markup(attacked, tmp_path):
    html, document = attacked
    plain = Document(report_with("x" * len(ATTACK)))
    outlines = [[(tag, [*names]) for tag, names in each.elements] for each in (plain, document)]
    assert outlines[0] == outlines[1]
    assert {tag for tag, _ in document.elements} <= TAGS
    assert {name for _, attributes in document.elements for name in attributes} <= ATTRIBUTES
    # It is shown as it is, with control characters made visible, and keeps its own direction.
    for part in (
        "<script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick='x' &amp;",
        "\u2400\u241b[31m\u2421\ufffd\ufffd\ufffd\u240d\n\n\u202e\u05e9",
        "w" * 3000,
    ):
        assert part in document.text
    texts = [each for each in document.of("details") if each.get("class") == "text"]
    assert {each["dir"] for each in texts} == {"auto"}
    assert "unicode-bidi: plaintext" in STYLE
    # The script's data cannot end it, and are what they were.
    (text,) = re.findall(r'id="data">(.*?)</script>', html)
    assert not re.search("[<>&\x7f-\U0010ffff]", text)
    assert data_of(html)["rollouts"][0][0]["prompt"] == ATTACK.strip()
    # The file can be written, and is the same for the same runs.
    write_whole(tmp_path / "report.html", html)
    read = (tmp_path / "report.html").read_bytes()
    assert read.decode("utf-8") == report_with(ATTACK)
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", read)


def test_policy_allows_exactly_the_scripts_and_styles_of_the_page(attacked):
    html, document = attacked
    (policy,) = [m["content"] for m in document.of("meta") if "http-equiv" in m]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for rule, tag, count in (("script-src", "script", 2), ("style-src", "style", 1)):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        hashes = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert len(texts) == count
        assert rules.pop(rule) == " ".join(f"'sha256-{each}'" for each in hashes)
    assert rules.pop("img-src") == "data:"
    assert rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    tags = [tag for tag, _ in document.elements]
    assert tags[:4] == ["html", "head", "meta", "meta"]  # before any content
    without_data = page("t", "<p>x</p>")
    assert "<script" not in without_data
    assert "script-src 'none'" in without_data


def test_nothing_is_fetched_and_every_link_is_met():
    html, document = report_of(rlhf_run("same"), rlhf_run("same"), RunData("other"))
    ids = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    links = {attributes["href"] for attributes in document.of("a")}
    assert links <= {f"#{each}" for each in ids}
    assert {"#summary", "#stage-0", "#stage-1", "#answers", "#time"} <= links
    # The library says where it comes from, in a comment.
    html = html.replace("/*! https://github.com/leeoniya/uPlot", "")
    for way in ("http:", "https:", "url(", "@import", "src=", "<link", "<iframe", "fetch("):
        assert way not in html


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """WCAG 2.2: the ratio of relative luminances."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_colors_have_enough_contrast_on_light_and_dark_pages():
    roots = re.findall(r":root \{(.*?)\}", STYLE, flags=re.DOTALL)
    assert len(roots) == 2
    for root in roots:
        colors = dict(re.findall(r"--(\w+): (#\w+)", root))
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
    charts, _ = charts_of([RunData("sft", train=lines)], 0)
    ((curve,),) = (chart["curves"] for chart in chart_data(charts))
    assert (curve["x"], curve["y"]) == ([0, 1, 2, 3, 4], [1, 2, None, 3, 4])
    assert charts[0].gaps == "training: 1 of 5 values not finite"


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("loss", ["nan", None], []),
        ("kl_coef", [2.0] * 50, ["KL coefficient: 2"]),
        ("kl_coef", [2.0, 2.0 + 1e-9, 2.0], ["KL coefficient: 2"]),
        ("kl_coef", [0.5], ["KL coefficient: 0.5"]),
        ("kl_coef", [1.0, 3.0], ["KL coefficient: 1 \u2192 3"]),
        ("policy_loss", [-3e-9, 3e-9] * 5, ["Policy loss: 0 up to rounding errors"]),
    ],
)
def test_a_curve_that_shows_nothing_is_a_line_of_text(name, values, words):
    lines = [{"step": step, name: value} for step, value in enumerate(values)]
    assert charts_and_lines(train=lines) == ([], words)


def test_runs_of_a_stage_share_charts_and_constants_of_each_are_told():
    def run(name, coefficient):
        lines = [{"step": s, "reward": coefficient * s, "kl_coef": coefficient} for s in range(3)]
        answers = [
            {"when": w, "prompt": "p", "answer": t} for w, t in (("before", "x"), ("after", name))
        ]
        facts = {"config": {"seed": coefficient, "lam": 1}, "answers": answers}
        return RunData("rlhf", facts, lines, label=name)

    assert "Options that differ" not in report_of(run("a", 1.0))[1].text
    html, document = report_of(run("a", 1.0), run("b", 2.0))
    (chart,) = data_of(html)["charts"]
    curves = {curve["name"]: curve["y"] for curve in chart["curves"]}
    assert curves == {"a, training": [0, 1, 2], "b, training": [0, 2, 4]}
    assert "KL coefficient: a, training 1, b, training 2" in document.text
    assert "Options that differoptionabseed12" in document.text
    # Both begin with the same model.
    assert "before a, before bxafter aaafter bb" in document.text


def test_bands_are_the_recorded_standard_errors_and_binomial_ones_of_accuracies():
    evals = [
        {"step": 0, "reward": 1.0, "reward_standard_error": 0.25, "accuracy": 0.5, "samples": 100},
        {"step": 1, "reward": 2.0, "accuracy": 0.9, "samples": 100},
        {"step": 2, "reward": 3.0, "reward_standard_error": 0.5, "accuracy": 1.0, "samples": 100},
    ]
    charts, _ = charts_of([RunData("rlhf", evals=evals)], 0)
    curves = {chart.metric.title: chart.curves[0] for chart in charts}
    assert curves["Reward"].errors == pytest.approx((0.25, math.nan, 0.5), nan_ok=True)
    assert curves["Accuracy"].errors == pytest.approx((5.0, 3.0, 0.0))  # percent
    (reward, _) = chart_data(charts[::-1])
    assert reward["curves"][0]["e"] == [0.25, None, 0.5]


def test_thinning_keeps_ends_extremes_and_gaps():
    values = [math.sin(step / 37) for step in range(20_000)]
    values[7_777], values[3_333], values[12_345] = 50.0, -50.0, math.nan
    kept = thin(values, 400)
    assert len(kept) <= 400
    assert {0, 3_333, 7_777, 12_345, 19_999} <= set(kept)
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
    html, _ = report_of(
        *(RunData("rlhf", train=lines, rollouts=rows, label=f"run {n}") for n in range(4))
    )
    assert len(html.encode()) < 2_000_000
    points = sum(len(c["x"]) for chart in data_of(html)["charts"] for c in chart["curves"])
    assert 0.5 * MOST_POINTS < points <= MOST_POINTS


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (short, {0.0: "0", 1.10834: "1.108", 12345.6: "12,346", 1e-5: "1.00e-05"}),
        (short, {2.5e8: "2.50e+08", number(None): "-"}),
        (duration, {2.163: "2.16 s", 90: "1.5 min", 3600: "1 h 0 min", 9000: "2 h 30 min"}),
        (operations, {0.0: "-", 5e6: "5 MFLOP", 1.25e9: "1.25 GFLOP", 3e15: "3 PFLOP"}),
        (operations, {7e18: "7 EFLOP"}),
    ],
)
def test_numbers_have_about_four_digits_and_their_unit(words, values):
    assert {value: words(value) for value in values} == values


def test_the_curves_of_each_stage_are_drawn_under_names_a_person_knows():
    def titles(train, held_out):
        train, evals = (
            [{"step": s, **dict.fromkeys(names.split(), s * 0.25)} for s in (1, 2, 3)]
            for names in (train, held_out)
        )
        return charts_and_lines(train=train, evals=evals)[0]

    assert titles("loss", "loss perplexity") == ["Loss", "Held-out perplexity"]
    pair = "loss accuracy margin"
    assert titles(pair, pair) == ["Loss", "Accuracy", "Margin"]
    fields = """reward kl kl_coef policy_loss value_loss entropy clip_fraction approx_kl
        explained_variance response_length eos_rate truncated_fraction"""
    drawn = titles(fields, "rule_score tokens")
    assert len(drawn) == len(fields.split()) + 1
    assert drawn[-1] == "Held-out rule score"
    # Those that are folded come last.
    assert titles("kl_coef entropy", "") == ["Entropy of the policy", "KL coefficient"]


# A run with all that a page tells of, and what it tells.
AUDIT = {
    "rows_by_type": {"preference": 90, "messages": 10},
    **{"train_rows": 100, "train_samples": 80, "tokens": 5000, "supervised_tokens": 1000},
    **{"dropped_rows": 20, "duplicate_rows": 0, "bad_rows": 1},
    "bad_row_examples": ["data.jsonl:3: " + ATTACK],
    "length_quantiles": {"min": 3, "max": 200},
    "longer_rows": {"64": 60, "128": 10},
    "left_out": {"tools, by the chat template": 4000},
}
TOKENS = {"name": "", "tokens": ["<a>", " b", "c"], "supervised": [0, 1, 1]}
FACTS = {
    "config": {
        **{"model_name_or_path": None, "lora_dim": 8, "lora_learning_rate": 1.5e-3},
        **{"seed": 1234, "adam_epsilon": 1e-8, "print_loss": False},
    },
    "versions": {"torch": "2.13.0"},
    "learns": {"model": {"words": "q_proj of 2 layers; frozen: norms"}, "other": 1},
    "parameters": {"total": 1_300_000_000, "trainable": 13_000_000},
    "results": {"bleu before": 1.2577, "bleu after": 1.1083, "share": 0.5, "a after": "x"},
    "data": {"audit": AUDIT},
    "token_losses": [
        {**TOKENS, "when": "before", "loss": [None, 4.5, 0.05]},
        {**TOKENS, "when": "after", "loss": [None, 0.8, "nan"]},
    ],
    "answers": [
        {"when": when, "prompt": prompt, "answer": f" {when} {prompt}"}
        for when in ("before", "after")
        for prompt in ("one", "two")
    ]
    + [{"when": "before", "prompt": "three", "answer": ""}]
    + [{"when": "before", "prompt": "\n\nHuman: four\n\nAssistant:", "answer": "a\nb\nc\nd\ne"}],
    "phases": {"generation": {"seconds": 30.0, "flops": 6e12}, "training": {"seconds": 10.0}},
    "memory": {"weights": 2**30, "peak": 3 * 2**30, "keeps_cache": True},
    "resumed": [{"step": 1}],
}
STEPS = [
    {"step": 1, "loss": 0.5, "accuracy": 0.5, "peak_memory_bytes": 2 * 2**30},
    {"step": 2, "loss": 3.0, "accuracy": 0.6, "peak_memory_bytes": 2**32},
    {"step": 146, "loss": 2.0, "accuracy": 0.975, "time": 27.0, "epoch": 2.0},
]
WARNINGS = [{"event": "warning", "step": step, "message": "KL is high"} for step in range(20, 27)]
WHOLE = RunData(
    *("nlg", FACTS, STEPS, [], [*WARNINGS, {"event": "skipped_step", "step": 50}]),
    rollouts=rollouts_of(*(f"p{n}" for n in range(6))),
)
TOLD = """
LoRA of rank 8 on the bundled tiny model (13,000,000 of 1,300,000,000 parameters)
146 optimizer steps, 2 epochs
27 s, 6 TFLOP, peak memory 4.00 GiB per device, resumed 1 time
bleu: 1.258 \u2192 1.108
share: 0.5
a after: x
held-out rowsbeforeafterrule score0.0000.807
step 20, 21, 22, 23, 24, ... (7 times)
Skipped_step step 50
24 responses to 6 prompts in 2 iterations
mean reward 5.5 in the first, 17.5 in the last
iteration 2, reward 23 (rule 11.5, p5 11.5)
30 s75.0%6 TFLOP200 GFLOP/s
90 preference, 10 messages
100 rows, 80 samples, 5,000 tokens
1,000 (20.0% of the tokens)
20 rowsdropped: longer than the limit
20 of 100 training rows were dropped or cut
data.jsonl:3: </title>
up to 64 tokens40 rows
up to 128 tokens50 rows
more10 rows
4,000 rowsleft out: tools, by the chat template
"""


@pytest.fixture(scope="module")
def whole():
    """The page of the run, and what a parser sees of it."""
    table = (["", "before", "after"], [["rule score", "0.000", "0.807"]])
    return report_of(WHOLE, tables={"held-out rows": table})


def test_a_page_tells_what_its_run_holds(whole):
    html, document = whole
    assert [each for each in TOLD.strip().splitlines() if each not in document.text] == []
    assert document.text.count("KL is high") == 1
    assert "repeat an earlier row" not in document.text
    bars = {m["aria-label"]: m["value"] for m in document.of("meter")}
    assert bars["nlg: generation"] == "0.7500"
    assert bars["up to 64 tokens"] == "0.4000"
    (row,) = re.findall(r"<h3>Memory</h3>.*?<tbody>(.*?)</tbody>", html)
    assert cells(row) == ["1", "3", "4", "75%"]
    assert "Warnings" not in report_of(RunData("sft"))[1].text
    assert "resultsabcde" in report_of(tables={"results": (["a"], [["b"], [], [*"cde"]])})[1].text


def test_every_chart_says_in_words_and_numbers_what_it_shows(whole):
    html, document = whole
    loss, accuracy = data_of(html)["charts"]
    assert loss["marks"] == list(range(20, 27))
    assert (accuracy["percent"], accuracy["curves"][0]["y"]) == (True, [50, 60, 97.5])
    labels = [each["aria-label"] for each in document.of("div") if each.get("role") == "img"]
    assert labels[0] == "Loss. training: 0.5 at step 1, 2 at step 146, between 0.5 and 3."


def test_tokens_answers_responses_and_settings_stand_where_they_belong(whole):
    html, _ = whole
    # Shades begin at 0.1, 0.7, 2 and 4 nats; tokens that are trained on are marked.
    (shown,) = re.findall(r"<summary>Loss of each token.*?</details>", html, re.S)
    assert shown.count("<span>&lt;a&gt;</span>") == 2
    assert '<mark class="down4" title="loss 4.5" tabindex="-1"> b</mark>' in shown
    assert '<mark class="down2" title="loss 0.8" tabindex="-1"> b</mark>' in shown
    assert '<mark title="loss 0.05" tabindex="-1">c</mark>' in shown
    assert '<mark class="down4" title="loss nan" tabindex="-1">c</mark>' in shown
    assert shown.index(">before<") < shown.index(">after<")

    def texts_of(part):
        return re.findall(r'<div class="text" dir="auto">(.*?)</div>', part)

    # Before the curves; those beyond three prompts are folded, and so are long texts.
    part = re.findall('<section id="answers">(.*?)</section>.*<section id="stage-0">', html, re.S)
    *samples, fourth = part[0].split('<div class="sample">')[1:]
    assert [texts_of(each) for each in samples] == [
        *(["one", "before one", "after one"], ["two", "before two", "after two"]),
        ["three", "(empty)"],
    ]
    assert samples[-1].endswith("<details><summary>1 more prompt</summary>")
    assert texts_of(fourth) == ["four"]
    assert "<summary><span>a ...</span></summary>a\nb\nc\nd\ne</details>" in fourth
    parts = re.split("<details><summary>(?:Highest|Lowest|Prompts)", html)[1:4]
    best, worst, changed = (
        [text.split(": ") for text in texts_of(part) if ": " in text] for part in parts
    )
    assert [int(n) for n, _ in best] == [23, 22, 21, 20, 19]
    assert [int(n) for n, _ in worst[:5]] == [0, 1, 2, 3, 4]
    # The best of the first and of the last iteration; all changed by 12.
    assert changed[:10] == [[str(2 * n + 1 + 12 * i), f"p{n}"] for n in range(5) for i in (0, 1)]
    # Settings that matter come first, and the others are folded again.
    first, second = html.split("Settings and versions")[1].split("<details>")[:2]
    shown = ("lora_learning_rate", "0.0015", "lora_dim", "1234", "torch 2.13.0")
    for text in (*shown, "learns (model)", "q_proj of 2 layers; frozen: norms"):
        assert text in first
    assert "print_loss" not in first
    for text in ("print_loss", "1e-08"):
        assert text in second


def test_ten_thousand_different_warnings_stay_readable():
    events = [{"event": "warning", "step": i, "message": f"message {i}"} for i in range(10_000)]
    _, document = report_of(RunData("rlhf", events=events))
    assert "and 9,950 more in metrics.jsonl" in document.text


@pytest.mark.parametrize(
    "changed", [{"loss": [1.0]}, {"loss": ["1", 2.0]}, {"tokens": [1, "b"]}, {"supervised": 1}]
)
def test_token_losses_that_cannot_be_read_are_left_out(changed):
    row = {"when": "after", "tokens": ["a", "b"], "supervised": [0, 1], "loss": [None, 2.0]}
    assert len(RunData("sft", {"token_losses": [row]}).token_losses) == 1
    assert RunData("sft", {"token_losses": [{**row, **changed}, "text"]}).token_losses == []


def test_time_and_operations_of_phases():
    rates = [(3.0, 2.0, 0.5), (7.0, 1.0, "nan"), (10.0, 4.0, 0.25)]
    steps = [{"time": t, "step_seconds": s, "tflops_per_device": rate} for t, s, rate in rates]
    # Sums over steps, on two devices; as run.json says; and of an interrupted run.
    by_steps = {"training": (7.0, 4e12), "evaluation and other": (3.0, 0.0)}
    assert RunData("s", {"world_size": 2}, steps).phases == by_steps
    said = {"generation": {"seconds": 60, "flops": 1e12}, "training": {"seconds": 30}}
    assert RunData("s", {"phases": said}, [{"time": 100.0}]).phases == {
        **{"generation": (60, 1e12), "training": (30, 0.0), "evaluation and other": (10, 0.0)}
    }
    times = {"generation_seconds": 2.0, "scoring_seconds": 0.5, "training_seconds": 1.0}
    assert RunData("s", {}, [times] * 3).phases == {
        **{"generation": (6.0, 0.0), "scoring": (1.5, 0.0), "training": (3.0, 0.0)}
    }


def test_sources_of_a_mixture_have_a_row_each():
    steps = [(3, 1, 30, 90), (4, 0, 50, 0), (2, 2, 20, 10)]
    train = [
        {"step": n, "samples/a": a, "samples/b": b, "tokens/a": s, "tokens/b": t, "epochs/a": n / 2}
        for n, (a, b, s, t) in enumerate(steps, start=1)
    ]
    train[0] |= {"loss/a": 4.0, "loss/b": None}
    train[1] |= {"loss/a": 3.5, "loss/b": 2.25}
    evals = [{"step": 0, "loss/a": 2.5, "loss/b": 3.0}, {"step": 3, "loss/a": 1.25}]
    config = {"data_path": ["no/a:3", "no/b:1"]}
    run = RunData("sft", {"config": config}, train=train, evals=evals)
    # 9 of 12 samples were of a.
    assert source_rows(run) == [
        ["a", "75.0%", "75.0%", "100", "1.5", "4", "3.5", "2.5", "1.25"],
        ["b", "25.0%", "25.0%", "100", "-", "2.25", "2.25", "3", "3"],
    ]
    assert "b25.0%25.0%100-2.252.2533" in report_of(run)[1].text
    without = replace(run, facts={"config": {"data_path": ["no/a", "no/b"]}}, evals=[])
    assert [row[1:3] + row[7:] for row in source_rows(without)] == [
        ["-", "75.0%", "-", "-"],
        ["-", "25.0%", "-", "-"],
    ]
    assert source_rows(RunData("sft", train=[{"step": 1, "samples/a": 3}])) == []


# Files.


def test_run_data_hold_what_the_run_left(tmp_path):
    lines = [
        {"kind": "eval", "step": 0, "time": 0.5, "perplexity": 2.0},
        {"kind": "train", "step": 1, "time": 1.5, "loss": "nan"},
        {"kind": "event", "step": 1, "time": 1.5, "event": "warning", "message": "m"},
    ]
    path = write_run(tmp_path / "run", {"stage": "sft", "config": {"seed": 1}}, lines)
    run = read_run(path)
    assert (run.name, run.config, run.seconds, run.notes) == ("sft", {"seed": 1}, 1.5, ())
    assert (run.train, run.evals, run.events) == ((lines[1],), (lines[0],), (lines[2],))


def test_runs_are_called_by_as_much_of_their_paths_as_tells_them_apart(tmp_path):
    runs = [tmp_path / "one" / "rlhf", tmp_path / "two" / "rlhf"]
    assert [run.label for run in read_runs(runs)] == ["one/rlhf", "two/rlhf"]
    assert [run.label for run in read_runs(runs[:1])] == ["rlhf"]


def test_files_that_cannot_be_read_are_told_and_the_others_are_drawn(tmp_path):
    losses = [{"kind": "train", "step": step, "loss": 3.0 - step} for step in (1, 2)]
    path = write_run(tmp_path / "run", {"stage": "sft"}, losses, tail='{"kind": "train", "st')
    _, document = report_of(read_run(path))
    assert "Loss: 2 \u2192 1" in document.text
    assert f"{path / 'metrics.jsonl'}: lines that cannot be read: 1" in document.text
    run = read_run(tmp_path / "rlhf")
    assert (run.name, len(run.notes)) == ("rlhf", 2)
    assert all(note.endswith("does not exist") for note in run.notes)
    assert "No metrics were logged." in report_of(run)[1].text
    for content in (b"", b"\n\n", b"\xff\xfe\x00", b"[1, 2]\nnull\n3\n"):
        for name in ("run.json", "metrics.jsonl"):
            (path / name).write_bytes(content)
        notes = " ".join(read_run(path).notes)
        assert "run.json is not a JSON object" in notes
        assert "metrics.jsonl has no lines" in notes
    much = json.dumps({**rollouts_of("p")[0], "reward": "much"})
    for broken in ("[]", "{}", '{"prompt": 1}', much):
        (path / "rollouts.jsonl.gz").write_bytes(gzip.compress(broken.encode()))
        assert "rollouts.jsonl.gz holds no responses of a run" in read_run(path).notes[-1]


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


ODD = [MARKUP, {MARKUP: MARKUP}, [MARKUP], -1, 1e308, math.nan, 10**400, True, None]
ODD += [[], {}, [[1]], "nan"]


def test_a_report_shows_whatever_stands_in_place_of_a_value(tmp_path):
    run = rlhf_run()
    lines = [dict(each) for each in (run.train[0], run.evals[0], run.events[0])]
    right = {"run": [dict(run.facts)], "lines": lines, "rolled": rollouts_of("a", "b")}
    cases = [
        (what, path, odd) for what in right for path in leaves(right[what]) for odd in ODD if path
    ]
    allowed = TAGS | {(tag, name) for tag in TAGS for name in ATTRIBUTES}
    for what, path, odd in cases if ALL else cases[::40]:
        files = right | {what: changed(right[what], path, odd)}
        texts = {
            name: "".join(json.dumps(each) + "\n" for each in rows) for name, rows in files.items()
        }
        (tmp_path / "run.json").write_text(texts["run"])
        (tmp_path / "metrics.jsonl").write_text(texts["lines"])
        (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(texts["rolled"].encode(), 1))
        elements = Elements(render_report("t", read_runs([tmp_path]), {})).found
        assert elements <= allowed, (what, path, odd)
