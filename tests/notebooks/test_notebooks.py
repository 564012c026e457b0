"""The notebooks run from nothing, show what their text says, and are kept with their outputs."""

import os
import re
from pathlib import Path

import nbformat
import pytest

from helpers.addons import of_the_whole
from helpers.spread import ALL
from scripts.run_notebooks import NOTEBOOKS, executed

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("quick_start", "grpo", "your_data", "images")
MOST_BYTES = 300_000
NUMBER = r"(-?\d+\.\d+)"
pytestmark = pytest.mark.stage


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    # A kernel begins in a directory of its own.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def kept(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def words_of(output):
    """What an output shows as text."""
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


def text_of(notebook):
    return "".join(map(words_of, outputs(notebook)))


def html_of(notebook):
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs(notebook))


def pairs(text, name):
    """The two numbers behind each ``name`` at the beginning of a line."""
    found = re.findall(rf"^{re.escape(name)}\s+{NUMBER}\s+{NUMBER}$", text, re.MULTILINE)
    return [(float(before), float(after)) for before, after in found]


def held_out(html, name):
    """The values of a metric of held-out rows before and after training, of each run's table."""
    tables = re.findall(r"<table>.*?</table>", html, re.DOTALL)
    for rows in ([re.findall(r"<t[hd][^>]*>(.*?)</t", r) for r in t.split("<tr>")] for t in tables):
        header, *lines = [row for row in rows if row]
        if header[0] == "held-out" and name in header:
            yield tuple(float(line[header.index(name)]) for line in lines)


def check_quick_start(text, html):
    ((before, after),) = pairs(text, "perplexity")
    assert after < before - 0.05
    ((before, after),) = pairs(text, "reward")
    assert after > before + 0.1
    assert next(held_out(html, "perplexity"))[1] < 1.2
    assert next(held_out(html, "accuracy"))[1] > 0.8
    asked = text.split("  after: ")[1:]
    assert sum("I hope this helps!" in answer.splitlines()[0] for answer in asked) >= 1
    assert "adapter_model.safetensors" in text
    assert "output/merged" in text


def check_grpo(text, html):
    ((before, after),) = pairs(text, "reward/is_polite  greedy")
    assert before < 0.2
    assert after > 0.8
    ((before, after),) = pairs(text, "reward/is_polite  drawn")
    assert after > before + 0.2
    assert all(after > before + 0.3 for before, after in held_out(html, "reward"))
    assert "[1.0, 0.0]\n[1.0, 0.0]" in text


def check_your_data(text, html):
    assert "[&lt;|end|&gt;]" in html  # learnt, as the text says
    assert "data[210]: row has [&#x27;question&#x27;]" in html + text.replace("'", "&#x27;")
    assert "1 row is left out" in text
    ((before, after),) = held_out(html, "perplexity")
    assert after < 1.2 < 5 < before
    (right, count) = map(int, re.search(r"(\d+) of (\d+) held-out answers", text).groups())
    assert right > 0.8 * count
    after = [answer.split("\n")[0] for answer in text.split("  after: ")[1:]]
    assert all("The number is" in answer for answer in after)


def check_images(text, html):
    assert "picture train_0000.png, 4 tokens" in html
    (before, after) = map(float, re.findall(rf"right (?:before|after ) {NUMBER}", text))
    assert 0.4 < before < after - 0.05
    ((before, after),) = held_out(html, "reward")
    assert after > before + 0.05


CHECKS = {
    "quick_start": check_quick_start,
    "grpo": check_grpo,
    "your_data": check_your_data,
    "images": check_images,
}


@of_the_whole
@pytest.mark.parametrize("name", NAMES if ALL else ["your_data"])
def test_a_notebook_runs_from_nothing_and_shows_what_it_says(name, tmp_path):
    notebook = executed(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    assert not [each for each in outputs(notebook) if each.output_type == "error"]
    assert not [each.text for each in outputs(notebook) if each.get("name") == "stderr"]
    CHECKS[name](text_of(notebook), html_of(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_of_a_notebook_is_what_it_shows(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook, content = kept(name), path.read_text("utf-8")
    assert path.stat().st_size < MOST_BYTES
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not re.search(r"/(?:tmp|home|root|work|usr|Users)/", content)
    assert not [each for each in outputs(notebook) if each.output_type == "error"]
    assert not [each for each in outputs(notebook) if each.get("name") == "stderr"]
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    CHECKS[name](text_of(notebook), html_of(notebook))


def test_curves_are_kept_as_pictures_that_every_viewer_shows():
    for name in ("quick_start", "grpo", "images"):
        assert any("image/png" in each.get("data", {}) for each in outputs(kept(name)))


@pytest.mark.parametrize("name", NAMES)
def test_colab_installs_as_the_documentation_says(name):
    first = next(cell.source for cell in kept(name).cells if cell.cell_type == "code")
    assert first.startswith("# In Colab, run this first")
    block = (ROOT / "docs" / "install.md").read_text("utf-8").split("<!-- colab -->")[1]
    commands = block.split("```")[1].strip().splitlines()
    said = [line.strip() for line in first.splitlines() if line.strip().startswith(("!", "%"))]
    assert said == [line for line in commands if "dschat-lora" not in line]


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_files(name):
    for cell in kept(name).cells:
        for target in re.findall(r"\]\(([^)\s#]+)", cell.source):
            assert (NOTEBOOKS / target).exists(), target
