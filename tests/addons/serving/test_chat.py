"""Chat in the terminal, and the command lines of chat and serve."""

import io
import json
import subprocess
import sys

import pytest

from dschat_lora.addons.serving import chat as chat_module
from dschat_lora.addons.serving.verbs import chat, serve
from helpers.served import QUESTIONS, peft_greedy, write_run


@pytest.fixture
def say(monkeypatch, capsys):
    """``say(lines, *argv)``: standard output and error of a chat that reads these lines."""

    def run(lines, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat([*map(str, argv), "--temperature", "0", "--max_new_tokens", "24"])
        return capsys.readouterr()

    return run


def prompt_of(*turns):
    """The built-in chat format of turns by user and assistant."""
    heads = ["\n\nHuman: ", "\n\nAssistant: "]
    text = "".join(
        heads[i % 2] + turn + ("<|end|>" if i % 2 else "") for i, turn in enumerate(turns)
    )
    return f"{text}\n\nAssistant:"


@pytest.mark.smoke
def test_each_answer_goes_on_from_what_was_said_before(say, runs):
    out, err = say(QUESTIONS[:2], runs["a"])
    first = peft_greedy(runs["a"], prompt_of(QUESTIONS[0]), 24).lstrip()
    second = peft_greedy(runs["a"], prompt_of(QUESTIONS[0], first, QUESTIONS[1]), 24).lstrip()
    assert out == f"{first}\n{second}\n"
    assert err.startswith("a, greedy: type a message")


@pytest.mark.thorough
def test_several_models_answer_under_their_names_with_a_score(say, runs):
    reward = runs["a"].parent / "reward"
    out, _ = say(QUESTIONS[:1], "base", runs["a"], runs["b"], "--reward", reward)
    lines = out.splitlines()
    for name in ("base", "a", "b"):
        text = peft_greedy(runs.get(name), prompt_of(QUESTIONS[0]), 24).lstrip()
        assert f"{name}: {text}" in out
    assert len([line for line in lines if line.startswith("(reward ")]) == 3


def test_commands_change_the_conversation(say, runs, tmp_path):
    file = tmp_path / "said.jsonl"
    lines = [
        *(QUESTIONS[1], "/reset", "/set system Be short.", QUESTIONS[0], "/regenerate"),
        *(f"/save {file}", f"/save {file}", "/set max_new_tokens 2", "/regenerate", "/quit"),
        QUESTIONS[2],
    ]
    out, err = say(lines, runs["a"])
    answer = peft_greedy(runs["a"], "Be short." + prompt_of(QUESTIONS[0]), 24).lstrip()
    assert "\n" not in answer
    _, first, again, saved, short = out.split("\n", 4)
    assert first == again == answer
    assert saved == f"saved to {file}"
    assert answer.startswith(short.strip())
    assert len(short) < len(answer)
    assert "File exists" in err
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": answer},
    ]


def test_mistakes_are_one_line_and_the_chat_goes_on(say, runs):
    lines = [
        *("/regenerate", "/save", "/save x", "/set", "/set temperature warm", "/set top_p 2"),
        *("/set max_new_tokens 0", "/nothing", "a " * 600, "Hi"),
    ]
    out, err = say(lines, runs["a"])
    _, *errors = err.splitlines()
    expected = [
        "/regenerate: nothing has been asked",
        "/save needs a file",
        "/save: nothing has been said",
        "/set : give one of temperature, top_p, top_k, max_new_tokens, seed, system, and a value",
        "/set temperature warm: give a number",
        "--top_p must be in (0, 1], got 2.0",
        "--max_new_tokens must be >= 1, got 0",
        "/nothing is not a command; /help lists them",
        "a has room for 512 tokens, the prompt has",
    ]
    for line, words in zip(errors, expected, strict=True):
        assert line.startswith(f"error: {words}")
    assert errors[-1].endswith("/reset starts over")
    assert out == peft_greedy(runs["a"], prompt_of("Hi"), 24).lstrip() + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat(say, runs, monkeypatch):
    write, left = chat_module.write_text, []

    def interrupted(text):
        write(text)
        if text.strip() and text != "base: " and not left:
            left.append(text)
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_module, "write_text", interrupted)
    lines = [QUESTIONS[0], "/regenerate", "/reset", QUESTIONS[0]]
    out, _ = say(lines, "base", runs["a"])
    base, tuned = (
        peft_greedy(run, prompt_of(QUESTIONS[0]), 24).lstrip() for run in (None, runs["a"])
    )
    # The second model has not begun its answer: its question is asked again, not doubled.
    both = f"base: {base}\na: {tuned}\n"
    assert out == f"base: {left[0]}\n(stopped)\n{both}{both}"
    assert base.startswith(left[0])


def test_a_question_without_an_answer_is_not_part_of_the_conversation(say, runs, monkeypatch):
    stopped = []

    def stop(*_):
        if not stopped:
            stopped.append(True)
            raise KeyboardInterrupt

    show = chat_module.ChatSession._show
    monkeypatch.setattr(chat_module.ChatSession, "_show", lambda *a: (stop(), show(*a)))
    out, _ = say([QUESTIONS[1], QUESTIONS[0]], runs["a"])
    answer = peft_greedy(runs["a"], prompt_of(QUESTIONS[0]), 24).lstrip()
    assert out == f"\n(stopped)\n{answer}\n"


def test_what_a_terminal_takes_for_commands_is_shown_as_text(capsys):
    chat_module.write_text("a\x1b[2Jb\r\tc\n\x07\x9b")
    assert capsys.readouterr().out == "a\\u001b[2Jb\\u000d\tc\n\\u0007\\u009b"


# The command lines


def test_chat_needs_no_library_of_a_server():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('starlette', 'uvicorn', 'llguidance')))\n"
        "import dschat_lora.addons.serving.chat"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_serve_without_its_libraries_names_the_extra(monkeypatch):
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    message = r"^dschat-lora serve needs uvicorn: pip install 'dschat_lora\[serving\]'$"
    with pytest.raises(ValueError, match=message):
        serve(["base"])


def test_runs_of_one_name_are_numbered_and_their_parts_have_the_name_of_the_run(runs, tmp_path):
    from dschat_lora.addons.serving.config import find_models, model_name

    other = write_run(tmp_path / "a", seed=3)
    words = [str(runs["a"] / "adapter"), str(other), str(runs["b"])]
    assert [each.name for each in find_models(words, with_base=True)] == ["base", "a", "a-2", "b"]
    actor = write_run(tmp_path / "rlhf" / "actor", seed=3)
    (named,) = find_models([str(actor.parent)], with_base=False)
    assert (named.name, named.source.adapter) == ("rlhf", (actor / "adapter").resolve())
    checkpoint = tmp_path / "sft" / "checkpoints" / "step-00000100"
    checkpoint.mkdir(parents=True)
    assert model_name(str(checkpoint)) == "sft-step-00000100"


def test_votes_go_beside_the_first_run(runs, tmp_path, monkeypatch):
    from dschat_lora.addons.serving.config import ServeConfig
    from dschat_lora.addons.serving.verbs import votes_path

    monkeypatch.chdir(tmp_path)
    assert votes_path(ServeConfig(models=(str(runs["a"]),))) == runs["a"] / "votes.jsonl"
    assert str(votes_path(ServeConfig(models=("base",)))) == "votes.jsonl"
    assert str(votes_path(ServeConfig(models=("base",), votes="v.jsonl"))) == "v.jsonl"
    with pytest.raises(ValueError, match="--votes .* is a directory"):
        votes_path(ServeConfig(models=("base",), votes=str(tmp_path)))
