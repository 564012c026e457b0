"""The report in a real browser: hostile data, hover values, smoothing, search, no scripts."""

import pytest
from test_html import ATTACK, rlhf_run

from dschat_lora.addons.report.html import render_report
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.config.staging import write_whole
from helpers.chromium import Page, find_chromium

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no chromium")
# What would show that a text became markup, or a script of it ran.
INJECTED = "document.querySelectorAll('img, [onclick], [onerror], main script').length"
BROWSER = "document.querySelector('.browser')"


def tokens_run():
    """A run with warnings, held-out errors, responses with numbers of tokens; hostile texts."""
    run = rlhf_run(ATTACK)
    evals = [
        {"step": step, "reward": step / 9, "reward_standard_error": 0.5, ATTACK: step}
        for step in (0, 10, 20, 30)
    ]
    first, *others = run.rollouts
    numbers = {"tokens": [ATTACK, "b", "c"], "token_kl": [0.0, 2.0, -1.0]}
    facts = {**run.facts, "stage": "rlhf", "status": "running"}
    rows = [{**first, **numbers, "response": "needle"}, *others]
    return RunData("rlhf", facts, run.train, evals, run.events, rows, run.notes, label=ATTACK)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    browser = Page(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_whole(path, render_report(ATTACK, [tokens_run(), rlhf_run(ATTACK)], {}))
    return path.as_uri()


@pytest.fixture
def opened(page, address):
    page.errors.clear()
    page.resize(1280, 900)
    page.allow_scripts(True)
    page.open(address)
    page.wait_for("document.querySelectorAll('.plot canvas').length > 5")
    return page


def test_hostile_data_runs_nothing_and_the_policy_stops_what_is_put_in_later(opened):
    assert opened.errors == []
    assert opened.evaluate(INJECTED) == 0
    assert opened.evaluate(f"{BROWSER}.textContent.includes('<script>alert(1)</script>')")
    opened.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.ran = true'})); "
        "document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.ran = true\">x</b>'); "
        "document.querySelector('b[onclick]').click()"
    )
    assert opened.evaluate("window.ran === undefined")


def test_the_pointer_shows_values_with_errors_and_smoothing_leaves_them(opened):
    plot = "document.querySelector('.plot')"
    opened.evaluate(f"{plot}.scrollIntoView({{block: 'center'}})")
    box = opened.evaluate(
        f"(({{x, y, width, height}}) => [x, y, width, height])"
        f"({plot}.querySelector('.u-over').getBoundingClientRect())"
    )
    opened.move_mouse(box[0] + box[2] - 2, box[1] + box[3] / 2)
    values = f"{plot}.parentElement.querySelector('.values').textContent"
    opened.wait_for(f"{values}.startsWith('step 30')")
    shown = opened.evaluate(values)
    assert "training 3" in shown
    assert "held-out 3.333 \u00b1 0.5" in shown
    slider = "document.querySelector('.controls [type=range]')"
    opened.evaluate(
        f"{slider}.value = 0.9; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    opened.move_mouse(box[0] + box[2] - 3, box[1] + box[3] / 2)
    # The reward of step n is n / 10; of the mean it has 0.9 times the weight of the next one.
    weights = [0.9 ** (30 - step) for step in range(1, 31)]
    mean = sum(w * step / 10 for step, w in enumerate(weights, 1)) / sum(weights)
    opened.wait_for(f"{values}.includes('training {mean:.4g}')")
    assert "held-out 3.333" in opened.evaluate(values)
    assert opened.errors == []


def test_responses_are_searched_ordered_and_coloured_by_token(opened):
    def choose(name, value):
        opened.evaluate(
            f"(() => {{ const each = {BROWSER}.querySelector('{name}'); each.value = '{value}'; "
            "each.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )

    count = f"{BROWSER}.querySelector('.count').textContent"
    assert opened.evaluate(count) == "4 of the 4 responses in this page"
    choose(".order", "high")
    firsts = (
        f"[...{BROWSER}.querySelectorAll('.when')].map((e) => e.textContent.split(' reward ')[1])"
    )
    assert [text[0] for text in opened.evaluate(firsts)] == ["3", "2", "1", "0"]
    choose(".least", "1.5")
    assert opened.evaluate(count) == "2 of the 4 responses in this page"
    choose(".least", "")
    choose(".text-filter", "NEEDLE")
    assert opened.evaluate(count) == "1 of the 4 responses in this page"
    choose(".by", "token_kl")
    spans = f"[...{BROWSER}.querySelectorAll('.tokens span')].map((e) => [e.className, e.title])"
    assert opened.evaluate(spans) == [
        ["", "KL to the reference 0"],
        ["up4", "KL to the reference 2"],
        ["down2", "KL to the reference -1"],
    ]
    assert opened.evaluate(INJECTED) == 0


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_nothing_is_wider_than_the_screen(opened, width):
    opened.resize(width, 900, dark=True)
    opened.wait_for("document.querySelector('.plot canvas').clientWidth <= innerWidth")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert opened.errors == []


def test_without_scripts_the_text_and_the_tables_remain(opened, address):
    opened.allow_scripts(False)
    opened.open(address)
    opened.wait_for("document.readyState === 'complete'")
    text = opened.evaluate("document.body.innerText")
    for part in ("Results", "training: 0.1 at step 1, 3 at step 30", "Warnings", "Time and memory"):
        assert part in text
    assert opened.evaluate("document.querySelectorAll('canvas').length") == 0
    assert opened.evaluate(
        "[...document.querySelectorAll('.controls')].every((e) => !e.offsetWidth)"
    )
    assert opened.errors == []
