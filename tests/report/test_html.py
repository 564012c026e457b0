"""The HTML report: data never becomes markup, nothing is fetched, odd runs are drawn too."""

import errno
import gzip
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from dschat_lora.report import html as html_module
from dschat_lora.report.charts import STYLE as CHART_STYLE
from dschat_lora.report.charts import (
    Curve,
    bounds,
    line_chart,
    stacked_bars,
    thin,
    tick_labels,
    ticks,
)
from dschat_lora.report.costs import phases_of
from dschat_lora.report.html import POLICY, render_report, write_report
from dschat_lora.report.markup import duration, number, operations, safe, short
from dschat_lora.report.story import StageStory, read_story
from dschat_lora.report.style import STYLE

ATTACK = (
    "</title></style></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick='x' "
    "&amp; &lt; <!-- ]]> \x00\x1b[31m\x7f\x85\ud800\ufffe\r\n\n\u202e\u05e9\u05dc\u05d5\u05dd "
    "\u0627\u0644\u0633\u0644\u0627\u0645 javascript:alert(1) " + "w" * 3000
)
TAGS = {
    *("html head meta title style body header h1 h2 h3 nav ul li a main section div table".split()),
    *("caption thead tbody tr th td figure figcaption small svg desc path text circle".split()),
    *("rect p details summary bdi".split()),
}
ATTRIBUTES = {
    *("lang charset http-equiv content name id class href dir scope aria-label role".split()),
    *("aria-labelledby aria-describedby aria-hidden viewbox d x y cx cy r width height".split()),
}
VOID = {"meta"}


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
        if self.open and self.open[-1] != "style":
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
    return StageStory(text, facts, train, evals, events, rollouts_of(text), notes=[text])


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


def report_of(story):
    html = render_report("a report", [story], {})
    return html, Document(html)


def write_run(directory, record, lines, tail=""):
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps(record))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + tail)
    return directory


def pictures(html):
    return [ET.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", html, flags=re.DOTALL)]


def chart(points, **options):
    """The picture of one curve."""
    (picture,) = pictures(line_chart("t", [Curve("training", points)], key="k", **options))
    return picture


def path_of(picture):
    (line,) = [p.get("d") for p in picture.iter("path") if "line" in p.get("class")]
    return line


def vertices(path):
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([-\d.]+)", path)]


# Data and markup.


def test_no_text_changes_the_markup():
    plain, attacked = (Document(report_with(text)) for text in ("x", ATTACK))
    assert [tag for tag, _ in attacked.elements] == [tag for tag, _ in plain.elements]
    names = [[list(attributes) for _, attributes in d.elements] for d in (plain, attacked)]
    assert names[0] == names[1]


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
    write_report(tmp_path / "report.html", report_with(ATTACK))
    read = (tmp_path / "report.html").read_bytes()
    assert read.decode("utf-8") == report_with(ATTACK)
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", read)


def test_no_name_of_a_chart_is_markup():
    curves = [Curve(ATTACK, [(1, 1.0), (2, math.nan), (3, 1.0)]), Curve("b", [(1, 1.0)], 1)]
    line = line_chart(ATTACK, curves, key="a", unit=ATTACK)
    bars = stacked_bars(
        ATTACK, [(ATTACK, {ATTACK: 1.0})], key="b", names=[ATTACK], format_value=lambda _: ATTACK
    )
    document = Document(line + bars)
    assert {tag for tag, _ in document.elements} <= TAGS
    assert {name for _, attributes in document.elements for name in attributes} <= ATTRIBUTES


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


def test_policy_forbids_scripts_and_outside_resources_before_any_content():
    document = Document(report_with("x"))
    policies = [m["content"] for m in document.of("meta") if "http-equiv" in m]
    assert policies == [POLICY]
    for rule in ("default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"):
        assert rule in POLICY.split("; ")
    tags = [tag for tag, _ in document.elements]
    assert tags[:4] == ["html", "head", "meta", "meta"]


def test_nothing_is_fetched():
    html = report_with("x")
    links = [attributes["href"] for attributes in Document(html).of("a")]
    assert all(link.startswith("#") for link in links)
    for way in ("http:", "https:", "url(", "@import", "src=", "<script", "<link", "<iframe"):
        assert way not in html


def test_ids_are_unique_and_every_reference_is_met():
    stories = [rlhf_run("same"), rlhf_run("same")]
    document = Document(render_report("t", stories, {}))
    assert len(set(document.ids)) == len(document.ids)
    for _, attributes in document.elements:
        for name in ("href", "aria-labelledby", "aria-describedby"):
            if name in attributes:
                assert attributes[name].lstrip("#") in document.ids


def test_every_picture_says_in_words_what_it_shows():
    named = [p for p in pictures(report_with("x")) if p.get("aria-hidden") is None]
    assert len(named) > 5
    for picture in named:
        assert picture.get("role") == "img"
        assert picture.find("title").text
        assert picture.find("desc").text
    words = chart([(1, 0.5), (2, 3.0), (3, 2.0)]).find("desc").text
    assert words == "training: 0.5 at step 1, 2 at step 3; between 0.5 and 3."


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
    for style in (STYLE, CHART_STYLE):
        roots = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)
        assert len(roots) == 2
        colors |= dict(re.findall(r"--(\w+): (#\w+)", roots[scheme]))
    for name in ("text", "muted", "warning", "link"):
        assert contrast(colors[name], colors["page"]) >= 4.5
        assert contrast(colors[name], colors["panel"]) >= 4.5
    for name in ("c0", "c1", "c2", "c3"):
        assert contrast(colors[name], colors["page"]) >= 3


# Curves.


def test_first_and_last_value_stand_at_the_ends_and_the_last_is_labelled():
    picture = chart([(0, 1.0), (50, 3.0), (100, 2.25)])
    (x0, y0), (x1, y1), (x2, y2) = vertices(path_of(picture))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx((y0 - y2) * 2 / 1.25, abs=0.3)
    assert [t.text for t in picture.iter("text") if t.get("class") == "value"] == ["2.25"]


def test_values_lie_on_the_scale_of_their_ticks():
    picture = chart([(0, 0.0), (10, 10.0), (20, 5.0)])
    ticks_at = {
        t.text: float(t.get("y")) - 4 for t in picture.iter("text") if t.get("class") == "end"
    }
    (_, low), (_, high), (_, middle) = vertices(path_of(picture))
    assert low == pytest.approx(ticks_at["0"], abs=0.2)
    assert high == pytest.approx(2 * ticks_at["5"] - ticks_at["0"], abs=0.5)
    assert middle == pytest.approx(ticks_at["5"], abs=0.2)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", math.nan, math.inf, 1e300, 10**400, True])
def test_what_cannot_be_drawn_is_a_gap(bad):
    values = [1.0, 2.0, bad, 3.0, 4.0]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values)]
    html, document = report_of(StageStory("sft", train=lines))
    line = path_of(pictures(html)[0])
    assert line.count("M") == 2
    assert len(vertices(line)) == 4
    assert "training: 1 of 5 values not finite" in document.text


def test_a_lone_value_between_gaps_is_drawn_as_a_dot():
    nan = math.nan
    assert path_of(chart([(1, nan), (2, 5.0), (3, nan), (4, 6.0), (5, 7.0)])).count("h0") == 2


@pytest.mark.parametrize(
    "values",
    [
        [0.5],
        [0.0],
        [2.0] * 50,
        [0.0, 0.0],
        [-3.0, -3.0],
        [1.0, 1.0 + 1e-15],
        [-1e99, 1e99],
        [1e-320, 0.0],
        [1e-99, 2e-99],
        [5e-324] * 3,
        [-0.0, 0.0],
    ],
    ids=str,
)
def test_any_values_are_drawn_inside_the_picture(values):
    picture = chart([(step, value) for step, value in enumerate(values)])
    width, height = (float(size) for size in picture.get("viewBox").split()[2:])
    points = vertices(path_of(picture))
    assert len(points) == len(values)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    assert not re.search("nan|inf", ET.tostring(picture, encoding="unicode"))


def test_a_curve_without_any_value_is_left_out():
    assert line_chart("t", [Curve("a", []), Curve("b", [(1, math.nan)])], key="k") == ""


def test_a_share_is_never_drawn_on_a_scale_beyond_its_limits():
    assert bounds([99.0, 100.0], top=100.0)[1] == 100.0
    assert bounds([0.0, 1.0], top=100.0)[0] == 0.0
    assert bounds([100.0, 103.0], top=100.0)[1] == 103.0


def test_held_out_values_are_told_from_those_of_training_without_color():
    curves = [Curve("training", [(1, 1.0), (2, 2.0)]), Curve("held-out", [(1, 1.0)], 1, True)]
    html = line_chart("t", curves, key="k")
    assert html.count('class="line s1 dashed"') == 2  # in the chart and in the legend
    assert html.count('class="line s0"') == 2


def test_labels_of_equal_last_values_do_not_cover_each_other():
    curves = [Curve("a", [(1, 1.0), (2, 2.0)]), Curve("b", [(1, 1.0), (2, 2.0)], 1)]
    html = line_chart("t", curves, key="k")
    labels = re.findall(r'<text class="value" x="\S+" y="(\S+)"', html)
    assert abs(float(labels[0]) - float(labels[1])) >= 12


def test_thinning_keeps_ends_extremes_and_gaps():
    points = [(float(step), math.sin(step / 37)) for step in range(20_000)]
    points[7_777] = (7_777.0, 50.0)
    points[3_333] = (3_333.0, -50.0)
    points[12_345] = (12_345.0, math.nan)
    kept = thin(points)
    assert len(kept) <= 400
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert (7_777.0, 50.0) in kept
    assert (3_333.0, -50.0) in kept
    assert sum(math.isnan(value) for _, value in kept) == 1
    assert kept == sorted(kept, key=lambda point: point[0])


def test_few_points_are_not_thinned():
    points = [(float(step), 0.0) for step in range(400)]
    assert thin(points) == points


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, ["0", "5", "10"]),
        (0.05, 0.25, ["0.05", "0.10", "0.15", "0.20", "0.25"]),
        (-1.2, 1.1, ["-1", "0", "1"]),
        (0, 4_000_000, ["0", "1,000,000", "2,000,000", "3,000,000", "4,000,000"]),
        (0, 8e-6, ["0", "2e-06", "4e-06", "6e-06", "8e-06"]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert tick_labels(ticks(low, high)) == expected


def test_ticks_of_steps_are_whole():
    assert ticks(1, 3, least=1.0) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (1.10834, "1.108"), (12345.6, "12,346"), (1e-5, "1.00e-05"), (2.5e8, "2.50e+08")],
)
def test_numbers_have_about_four_digits(value, expected):
    assert short(value) == expected


def test_a_number_that_is_none_is_shown_as_a_dash():
    assert short(number(None)) == "-"


# Stages.


def test_the_curves_of_each_stage_are_drawn():
    def titles(train, evals):
        story = StageStory("s", train=[{"step": 1, **train}], evals=[{"step": 1, **evals}])
        return re.findall(r"<figcaption>(.*?)(?: <|<)", render_report("t", [story], {}))

    assert titles({"loss": 1.0}, {"loss": 1.0, "perplexity": 3.0}) == [
        "Loss",
        "Held-out perplexity",
    ]
    pair = {"loss": 1.0, "accuracy": 0.5, "margin": 0.1, "chosen_score": 1.0}
    assert titles(pair, pair) == ["Loss", "Accuracy", "Margin"]
    fields = """reward kl kl_coef policy_loss value_loss entropy clip_fraction approx_kl
        explained_variance response_length eos_rate truncated_fraction""".split()
    drawn = titles(dict.fromkeys(fields, 0.5), {"rule_score": 0.5, "tokens": 5})
    assert len(drawn) == len(fields) + 1
    assert drawn[-1] == "Held-out rule score"


def test_shares_are_drawn_in_percent():
    html, _ = report_of(StageStory("reward", train=[{"step": 1, "accuracy": 0.975}]))
    (value,) = re.findall(r'<text class="value"[^>]*>(.*?)</text>', html)
    assert value == "97.5"


def test_warnings_are_listed_once_with_their_steps_and_marked_in_the_charts():
    train = [{"step": step, "reward": 1.0 * step} for step in range(1, 101)]
    events = [{"event": "warning", "step": step, "message": "KL is high"} for step in range(20, 27)]
    events.append({"event": "skipped_step", "step": 50})
    html, document = report_of(StageStory("rlhf", train=train, events=events))
    assert document.text.count("warning: KL is high") == 1
    assert "step 20, 21, 22, 23, 24, ... (7 times)" in document.text
    assert "skipped_step step 50" in document.text
    marks = [p for p in pictures(html)[0].iter("path") if p.get("class") == "mark"]
    assert len(marks) == 7


def test_ten_thousand_different_warnings_stay_readable():
    events = [{"event": "warning", "step": i, "message": f"message {i}"} for i in range(10_000)]
    _, document = report_of(StageStory("rlhf", events=events))
    assert "and 9,950 more in metrics.jsonl" in document.text


def test_answers_to_one_prompt_stand_side_by_side():
    answers = [
        {"when": when, "prompt": prompt, "answer": f" {when} {prompt}"}
        for when in ("before", "after")
        for prompt in ("one", "two")
    ]
    answers.append({"when": "before", "prompt": "three", "answer": ""})
    html, _ = report_of(StageStory("sft", {"answers": answers}))
    samples = html.split('<div class="sample">')[1:]
    texts = [re.findall(r'<div class="text" dir="auto">(.*?)</div>', each) for each in samples]
    assert texts[0] == ["one", "before one", "after one"]
    assert texts[1] == ["two", "before two", "after two"]
    assert texts[2] == ["three", "(empty)"]


def test_the_best_worst_and_most_changed_responses_of_training_are_shown():
    rows = rollouts_of(*(f"p{n}" for n in range(6)))
    html, document = report_of(StageStory("rlhf", rollouts=rows))
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
    _, document = report_of(read_story(run))
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
    html, _ = report_of(StageStory("sft", facts))
    _, first, second = html.split("<details>")
    for text in ("lora_learning_rate", "0.0015", "lora_dim", "1234", "torch 2.13.0"):
        assert text in first
    assert "print_loss" in second
    assert "1e-08" in second
    assert "print_loss" not in first


def test_summary_tells_what_was_trained_and_holds_the_given_tables():
    facts = {
        "status": "finished",
        "config": {"model_name_or_path": None},
        "parameters": {"total": 1_300_000_000, "trainable": 13_000_000},
        "results": {
            "perplexity before": 1.2577,
            "perplexity after": 1.1083,
            "share": 0.5,
            "a after": "x",
        },
    }
    story = StageStory("sft", facts, train=[{"step": 146, "time": 27.0}])
    tables = {"held-out rows": (["", "before", "after"], [["rule score", "0.000", "0.807"]])}
    text = Document(render_report("t", [story], tables)).text.split("Supervised")[0]
    for part in (
        "finished",
        "the bundled tiny model",
        "13000000 of 1300000000 (1.0%)",
        "146",
        "27 s",
    ):
        assert part in text.replace(",", "")
    assert "perplexity 1.258 \u2192 1.108\nshare 0.5\na after x" in text
    assert "held-out rowsbeforeafterrule score0.0000.807" in text


def test_a_report_without_stages_has_its_tables():
    document = Document(render_report("t", [], {"results": (["a"], [["b"], [], ["c", "d", "e"]])}))
    assert "resultsabcde" in document.text


def test_the_same_runs_give_the_same_report():
    assert report_with("x") == report_with("x")


# Time and operations.


def test_operations_of_a_stage_are_the_sum_over_its_steps():
    lines = [
        {"step": 1, "time": 3.0, "step_seconds": 2.0, "tflops_per_device": 0.5},
        {"step": 2, "time": 7.0, "step_seconds": 1.0, "tflops_per_device": "nan"},
        {"step": 3, "time": 10.0, "step_seconds": 4.0, "tflops_per_device": 0.25},
    ]
    story = StageStory("sft", {"world_size": 2}, train=lines)
    assert phases_of(story) == {
        "training": (7.0, pytest.approx(2 * (2.0 * 0.5 + 4.0 * 0.25) * 1e12)),
        "evaluation and other": (3.0, 0.0),
    }


def test_phases_of_run_json_are_taken_as_they_are():
    phases = {"generation": {"seconds": 60, "flops": 1e12}, "training": {"seconds": 30}}
    story = StageStory("rlhf", {"phases": phases}, train=[{"step": 1, "time": 100.0}])
    assert phases_of(story) == {
        "generation": (60.0, 1e12),
        "training": (30.0, 0.0),
        "evaluation and other": (10.0, 0.0),
    }


def test_phases_of_an_interrupted_run_are_summed_over_its_lines():
    lines = [{"generation_seconds": 2.0, "scoring_seconds": 0.5, "training_seconds": 1.0}] * 3
    assert phases_of(StageStory("rlhf", train=lines)) == {
        "generation": (6.0, 0.0),
        "scoring": (1.5, 0.0),
        "training": (3.0, 0.0),
    }


def test_bars_are_as_long_as_their_parts():
    rows = [("a", {"generation": 30.0, "training": 10.0}), ("b", {"training": 20.0, "other": 0.0})]
    rows.append(("empty", {"training": 0.0}))
    names = ["generation", "training", "other"]
    html = stacked_bars("Time", rows, key="k", names=names, format_value=duration)
    picture = next(p for p in pictures(html) if p.get("role") == "img")
    bars = [tuple(r.get(k) for k in ("class", "x", "width")) for r in picture.iter("rect")]
    assert bars == [("f0", "0.0", "298.5"), ("f1", "300.0", "98.5"), ("f1", "0.0", "198.5")]
    assert "other" not in html
    assert "empty" not in html


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


def test_story_holds_what_the_run_left(tmp_path):
    record = {"stage": "sft", "config": {"seed": 1}, "throughput": {"steps": 3}}
    lines = [
        {"kind": "eval", "step": 0, "time": 0.5, "perplexity": 2.0},
        {"kind": "train", "step": 1, "time": 1.5, "loss": "nan"},
        {"kind": "event", "step": 1, "time": 1.5, "event": "warning", "message": "m"},
    ]
    story = read_story(write_run(tmp_path / "run", record, lines))
    assert story.name == "sft"
    assert (story.config, story.part("throughput")) == ({"seed": 1}, {"steps": 3})
    assert (story.train, story.evals, story.events) == ((lines[1],), (lines[0],), (lines[2],))
    assert story.seconds == 1.5
    assert story.notes == ()


def test_a_torn_last_line_is_told_and_the_others_are_drawn(tmp_path):
    lines = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "train", "step": 2, "loss": 1.0}]
    run = write_run(tmp_path / "run", {"stage": "sft"}, lines, tail='{"kind": "train", "st')
    story = read_story(run)
    assert len(story.train) == 2
    html, document = report_of(story)
    assert len(vertices(path_of(pictures(html)[0]))) == 2
    assert f"{run / 'metrics.jsonl'}: lines that cannot be read: 1" in document.text


def test_missing_files_are_told(tmp_path):
    story = read_story(tmp_path / "rlhf")
    _, document = report_of(story)
    assert story.name == "rlhf"
    assert f"{tmp_path / 'rlhf' / 'run.json'} does not exist" in document.text
    assert f"{tmp_path / 'rlhf' / 'metrics.jsonl'} does not exist" in document.text
    assert "No curves: no metrics." in document.text


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00", b"[1, 2]\nnull\n3\n"])
def test_files_without_any_object_are_told(tmp_path, content):
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(content)
    _, document = report_of(read_story(tmp_path))
    assert "run.json is no JSON object" in document.text
    assert "metrics.jsonl has no lines" in document.text


@pytest.mark.parametrize("odd", [None, 5, "text", [], [1], {}, {"a": 1}, [{"when": 5}]], ids=str)
def test_fields_of_another_type_do_not_break_the_report(odd):
    names = "stage status config versions parameters results answers phases throughput data".split()
    line = {"step": odd, "time": odd, "loss": odd, "reward": odd, "event": odd, "message": odd}
    facts = dict.fromkeys((*names, "command", "world_size"), odd)
    report_of(StageStory("s", facts, train=[line], evals=[line], events=[line]))


def test_a_report_replaces_the_earlier_one_whole(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, "long " * 1000)
    write_report(path, "short")
    assert path.read_text() == "short"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_earlier_report_and_names_the_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report(path, "earlier")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(html_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*report.html"):
        write_report(path, "later")
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
