"""How a notebook shows a run: while it goes on, at its end, after an interrupt; by real kernels."""

import json
import os
import queue
import re
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from dschat_lora.addons.report import notebook
from dschat_lora.addons.report.notebook import NotebookView, curve, eval_table, point
from dschat_lora.api.stages import Run
from dschat_lora.report.terminal import current_viewer
from dschat_lora.report.texts import as_written

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\x00'
LINE = {"kind": "train", "step": 1, "epoch": 0.5, "loss": 2.0}


def is_harmless(html):
    return not re.search(r"<script|<img|onerror=\w+\(1\)>", html) and "\x00" not in html


@pytest.fixture
def shown(monkeypatch):
    """What a view shows, one by one, without a notebook."""
    contents = []
    monkeypatch.setattr(NotebookView, "_refresh", lambda view, **_: contents.append(view.html()))
    return contents


def test_notes_and_warnings_stay_in_sight_and_other_lines_are_folded(shown):
    view = NotebookView("sft")
    view.say("  rows         40 prompt-completion; 0 bad (0 empty)")
    view.say(f"output: {Path.cwd()}/output/sft")
    view.say("  note         the adapter is continued")
    view.say("  warning      no row is held out")
    before, folded = shown[-1].split("<details>")
    assert "the adapter is continued" in before
    assert "Warning: no row is held out" in before
    assert "40 prompt-completion" in folded
    assert "40 prompt-completion" not in before
    assert "output: output/sft" in folded  # paths below the working directory are short


def test_a_bar_says_how_far_the_run_is_and_goes_at_its_end(shown):
    view = NotebookView("sft")
    view.expect(4, 1)
    view.add("train", LINE)
    assert '<progress max="4" value="2"' in shown[-1]
    assert "step 2 of 4" in shown[-1]
    view._display = object()
    view.end("failed", "the disk is full")
    assert "failed, step 2 of 4" in shown[-1]
    assert "<li>Error: the disk is full</li>" in shown[-1]
    assert "<progress" not in shown[-1]


def test_lines_and_metrics_of_any_text_are_no_markup(shown):
    view = NotebookView(HOSTILE)
    view.say(f"  warning      {HOSTILE}")
    view.say(HOSTILE)
    view.add("eval", {"kind": "eval", "step": 0, "loss": HOSTILE, "perplexity": 2.0})
    view.add("train", {**LINE, "loss": HOSTILE})
    assert is_harmless(shown[-1])
    assert "&lt;script&gt;" in shown[-1]


def test_a_run_of_any_text_is_no_markup(tmp_path):
    home = tmp_path / "run <b>"
    home.mkdir()
    assert "run &lt;b&gt;" in Run(home)._repr_html_()  # of a model that is no run its path
    answers = [{"when": "before", "prompt": HOSTILE, "answer": HOSTILE + "x<|end|>"}]
    facts = {"stage": HOSTILE, "status": HOSTILE, "answers": answers}
    facts["config"] = {"model_name_or_path": HOSTILE, "lora_dim": HOSTILE}
    (home / "run.json").write_text(json.dumps(facts))
    lines = [{"kind": "eval", "step": 0, "perplexity": HOSTILE, "loss": 1.0}]
    lines += [{**LINE, "step": step, "loss": loss} for step, loss in enumerate([2.0, "nan", 1.0])]
    lines.append({"kind": "event", "step": 3, "event": "warning", "message": HOSTILE})
    (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = Run(home)._repr_html_()
    assert is_harmless(html)
    assert "run &lt;b&gt;" in html
    assert ">before</th></tr>" in html  # without a column for answers after training
    assert html.count("x</summary>") + html.count("x</td>") == 1  # the end is not shown
    assert html.count("<polyline") == 1


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("\n\nHuman: Sort 3 1.\nUp.\n\nAssistant:", "Sort 3 1.\nUp."),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hi"),
        (" Complete this ", "Complete this"),
        *[
            (each, each)
            for each in ("Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", "Human: a")
        ],
    ],
)
def test_a_prompt_of_one_turn_is_shown_without_its_role_markers(prompt, shown):
    assert as_written(prompt) == shown


def test_a_curve_leaves_out_what_is_not_finite_and_has_numbers_on_its_axes():
    lines = [{"step": n, "loss": value} for n, value in enumerate([3.0, "inf", 1.0, 2.0])]
    picture = curve([p for line in lines for p in point(line)])
    assert picture.words == "loss: 3 at step 0, 2 at step 3, between 1 and 3"
    assert picture.path.split() == ["56.0,24.0", "333.3,132.0", "472.0,78.0"]
    assert [number for _, number in picture.x_ticks] == ["0", "1", "2", "3"]
    assert picture.last == (78, "2")
    assert picture.y_ticks == [(132, "1"), (105, "1.5"), (78, "2"), (51, "2.5"), (24, "3")]
    assert curve([p for line in lines[:2] for p in point(line)]) is None


def test_evaluations_are_the_first_and_the_last():
    evals = [{"step": step, "perplexity": 9.0 - step} for step in (0, 2, 4)]
    rows = [["after step 0", "9"], ["after step 4", "5"]]
    assert eval_table(evals, {}) == (["held-out", "perplexity"], rows)
    assert eval_table([], {})[1] == []


def test_iterations_and_optimizer_steps_are_told_apart(shown):
    view = NotebookView("rlhf")
    view.expect(6, 0)
    view.add("eval", {"step": 0, "reward": 0.25})
    view.add("train", {"step": 4, "iteration": 1, "reward": 0.5, "equal_prompts": 1, "prompts": 8})
    assert "prompts without signal 1 of 8" in shown[-1]
    view.add("train", {"step": 8, "iteration": 2, "reward": 0.5})
    view.add("eval", {"step": 8, "reward": 0.75})
    assert "iteration 2 of 6, 8 steps" in shown[-1]
    assert "after iteration 0, step 0" in shown[-1]
    assert "after iteration 2, step 8" in shown[-1]


def test_no_view_outside_of_a_notebook():
    assert not notebook.in_notebook()
    with notebook.shown_in_notebook("sft", quiet=False):
        assert current_viewer() is None


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    manager, client = start_new_kernel(
        cwd=str(tmp_path_factory.mktemp("kernel")),
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run_cell(client, code, *, on_message=lambda kind, content: None, seconds=120):
    """What a cell sends: pairs of a kind and a content."""
    request, sent, deadline = client.execute(code), [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        sent.append((kind, content))
        on_message(kind, content)
        if kind == "status" and content["execution_state"] == "idle":
            return sent
    raise AssertionError(f"{code!r} goes on after {seconds} s: {sent}")


@pytest.mark.thorough
@pytest.mark.stage
def test_an_interrupt_saves_a_checkpoint_and_the_next_cell_works(kernel, tmp_path):
    manager, client = kernel
    is_interrupted = False

    def interrupt(kind, content):
        nonlocal is_interrupted
        if kind == "update_display_data" and not is_interrupted:
            text = content["data"]["text/plain"]
            if re.search(r"step [1-9]\d* of", text):
                is_interrupted = True
                manager.interrupt_kernel()

    messages = run_cell(
        client,
        "import dschat_lora as dl\n"
        'run = dl.sft(lora_dim=4, max_steps=2000, output_dir="output/long", eval_ratio=0,\n'
        "    per_device_train_batch_size=4)",
        on_message=interrupt,
    )
    (error,) = [content for kind, content in messages if kind == "error"]
    assert error["ename"] == "Interrupted"
    assert error["traceback"] == [
        "Interrupted: a checkpoint is saved; go on by the same call with "
        'resume="latest", output_dir="output/long"'
    ]
    assert not [content for kind, content in messages if kind == "stream"]
    shown = [c["data"]["text/plain"] for kind, c in messages if kind == "update_display_data"]
    assert re.match(r"Supervised fine-tuning: stopped, step \d+ of 2,000", shown[-1])

    messages = run_cell(
        client,
        'run = dl.sft(output_dir="output/long", resume="latest",\n'
        '    callbacks=[lambda event, step, metrics: "stop" if event == "train" else None])\n'
        "print(run.status, len(run.generate('Hi', max_new_tokens=2)) == 1)",
    )
    assert not [content for kind, content in messages if kind == "error"]
    (text,) = [content["text"] for kind, content in messages if kind == "stream"]
    assert text == "stopped True\n"


@pytest.mark.stage
def test_a_wrong_option_shows_its_message_and_no_view(kernel):
    _, client = kernel
    messages = run_cell(client, "import dschat_lora as dl\ndl.sft(lora_dmi=8)")
    (error,) = [content for kind, content in messages if kind == "error"]
    assert "lora_dim" in error["evalue"]
    assert not [content for kind, content in messages if kind == "display_data"]
