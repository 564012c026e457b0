"""Every verb told to stop, or held up, at random instants; two runs that want one directory."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from harness import (
    DECODE,
    GLUE,
    LONG,
    NLG,
    RLHF,
    TINY,
    broken_checkpoints,
    check_same_end,
    read_manifested,
    same_bits,
    trained_steps,
    valid_checkpoints,
    wait_until,
)

from dschat_lora.assets import BUNDLED_DATA
from helpers.addons import has_verb

pytestmark = pytest.mark.stage

DATA = str(BUNDLED_DATA["eval"])
STEPS = ["--max_steps", "6", "--save_interval", "2"]
CONVERTER = """
import sys, time
with open(sys.argv[sys.argv.index("--outfile") + 1], "w") as file:
    for _ in range(10):
        file.write("part ")
        file.flush()
        time.sleep(0.05)
"""
#: words, seconds of CPU, the file or directory that must be whole if it is there
VERBS = {
    "sft": (["sft", *TINY, *STEPS], 0.8, "out/adapter/manifest.json"),
    "reward": (["reward", *TINY, *STEPS], 0.8, "out/adapter/manifest.json"),
    "dpo": (["dpo", *TINY, *STEPS], 1.2, "out/adapter/manifest.json"),
    "rlhf": (["rlhf", *RLHF, "--save_interval", "1"], 1.5, "out/actor/adapter/manifest.json"),
    "merge": (["merge", "SFT", "--output_dir", "m"], 0.3, "m/tokenizer.json"),
    "export": (["export", "SFT", "--llama_cpp", ".", "--output_path", "o.gguf"], 0.8, "o.gguf"),
    "generate": (
        ["generate", "SFT", "--data_path", DATA, "--max_new_tokens", "8", "--output_path", "o"],
        1.0,
        "o",
    ),
    "score": (["score", "REWARD", DATA, "--output_path", "o"], 0.8, "o"),
    "report": (["report", "SFT", "--output_path", "r.html"], 0.1, "r.html"),
    "eval": (["eval", "SFT", DATA], 1.0, ""),
    "audit": (["audit", DATA], 0.2, ""),
    "plan": (["plan", "sft"], 0.3, ""),
    "inspect": (["inspect", "SFT"], 0.1, ""),
    "rollouts": (["rollouts", "PPO"], 0.1, ""),
    "serve": (["serve", "SFT", "--port", "0"], 0.8, ""),
}
SIGNALS = {
    signal.SIGTERM: (143, -signal.SIGTERM),
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGHUP: (129, -signal.SIGHUP),
    signal.SIGSTOP: (),
}
WHOLE = {"o.gguf": 10, "o": 300}  # words, and lines
CHOSEN = [("merge", signal.SIGTERM), ("export", signal.SIGTERM), ("score", signal.SIGINT)]
CHOSEN = [(verb, number) for verb, number in CHOSEN if has_verb(verb)]
EVERY = [(verb, number) for verb in VERBS if has_verb(verb) for number in SIGNALS]


def disturbed(verb_run, words, home, verb, number, attempt, seconds):
    """How a verb ended that was sent a signal at a random instant."""
    instant = random.Random(f"{verb} {number} {attempt}").uniform(0.05, seconds)

    def act(running):
        time.sleep(instant)
        running.signal(number)
        if number == signal.SIGSTOP:
            time.sleep(0.3)
            running.signal(signal.SIGCONT)
            if verb == "serve":
                running.signal(signal.SIGTERM)

    done = verb_run(*words, home=home, act=act)
    allowed = {0, *SIGNALS[number]} | ({0, -signal.SIGTERM} if verb == "serve" else set())
    assert done.code in allowed, f"{instant}: {done.code} {done.out} {done.err}"
    # Ctrl-C may also fall into what libraries do at the interpreter's end.
    assert "Traceback" not in done.out + done.err.partition("Exception ignored in atexit")[0]
    assert not done.left
    return done


@pytest.mark.parametrize(("verb", "number"), EVERY if LONG else CHOSEN)
@pytest.mark.parametrize("attempt", range(3 if LONG else 1))
def test_signal_at_a_random_instant_leaves_whole_files_or_none(
    verb, number, attempt, verb_run, trained, tmp_path
):
    words, seconds, whole = VERBS[verb]
    for name in ("convert_lora_to_gguf.py", "convert_hf_to_gguf.py"):
        (tmp_path / name).write_text(CONVERTER)
    words = [trained.get(word, word) for word in words]
    done = disturbed(verb_run, words, tmp_path, verb, number, attempt, seconds)
    assert not broken_checkpoints(tmp_path / "out")
    path = tmp_path / whole
    if whole and done.code == 0:
        assert path.exists()
    if whole in WHOLE and path.exists():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines() if whole == "o" else text.split()) == WHOLE[whole]
    if whole == "r.html" and path.exists():
        assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.skipif(not LONG, reason="five runs of step 3; test_exact.py stops step 1")
def test_run_that_was_stopped_ends_as_one_that_was_not(verb_run, trained, tmp_path):
    """SIGTERM, SIGINT, SIGHUP and a pause, one after another, in one run of step 3."""
    words = ["rlhf", *(trained.get(word, word) for word in RLHF), "--max_steps", "5"]
    words += ["--resume_from_checkpoint", "auto", "--save_interval", "1"]
    homes = [tmp_path / name for name in ("whole", "stopped")]
    for home in homes:
        home.mkdir()
    assert verb_run(*words, home=homes[0]).code == 0
    out, numbers = homes[1] / "out", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for number in numbers:
        before = trained_steps(out)

        def act(running, number=number, before=before):
            wait_until(lambda: trained_steps(out) > before, running)
            running.signal(signal.SIGSTOP)
            running.signal(signal.SIGCONT)
            running.signal(number)

        done = verb_run(*words, home=homes[1], act=act)
        assert done.code in (0, 128 + number), done.err
        if done.code:
            assert max(valid_checkpoints(out)) == trained_steps(out)
    assert verb_run(*words, home=homes[1]).code == 0
    for name in ("actor", "critic"):
        path = f"out/{name}/adapter/adapter_model.safetensors"
        assert (homes[0] / path).read_bytes() == (homes[1] / path).read_bytes()


@pytest.mark.thorough
def test_second_run_in_a_directory_is_refused_while_the_first_goes_on(verb_run, tmp_path):
    refused = []

    def act(running):
        out = tmp_path / "out"
        wait_until(lambda: trained_steps(out), running)
        running.signal(signal.SIGSTOP)
        ways = ([], ["--overwrite_output_dir"], ["--resume_from_checkpoint", "auto"])
        for more in ways if LONG else ways[1:2]:
            refused.append(verb_run("sft", *TINY, *STEPS, *more, home=tmp_path))
        running.signal(signal.SIGCONT)

    done = verb_run("sft", *TINY, *STEPS, home=tmp_path, act=act)
    assert done.code == 0, done.err
    for each in refused:
        assert each.code == 2
        assert each.err == (
            "error: another run is writing to out; wait for it, stop it, or choose another "
            "--output_dir\n"
        )
    (tmp_path / "alone").mkdir()
    whole = verb_run("sft", *TINY, *STEPS, home=tmp_path / "alone")
    assert whole.code == 0
    check_same_end(tmp_path / "out", tmp_path / "alone" / "out")


@pytest.mark.skipif(not LONG, reason="two models loaded at a time, each twice")
@pytest.mark.parametrize("verb", filter(has_verb, ["generate", "score", "report", "merge"]))
def test_two_commands_that_write_one_file_leave_one_whole(verb, verb_run, trained, tmp_path):
    words = [trained.get(word, word) for word in VERBS[verb][0]]
    second = []

    def act(running):
        second.append(verb_run(*words, home=tmp_path))

    first = verb_run(*words, home=tmp_path, act=act)
    for done in (first, *second):
        assert done.code in ((0, 1, 2) if verb == "merge" else (0,)), done.err
        assert "Traceback" not in done.err
    assert any(done.code == 0 for done in (first, *second))
    if verb in ("generate", "score"):
        lines = (tmp_path / "o").read_text(encoding="utf-8").splitlines()
        assert len([json.loads(line) for line in lines]) == 300
    if verb == "merge":
        assert verb_run("generate", "m", "hello", home=tmp_path).code == 0


@pytest.mark.parametrize("verb", ["sft", "rlhf"] if LONG else ["sft"])
def test_output_directory_that_vanishes_ends_the_run_in_a_line(verb, verb_run, trained, tmp_path):
    out = tmp_path / "out"

    def act(running):
        wait_until(lambda: trained_steps(out), running)
        running.signal(signal.SIGSTOP)
        out.rename(tmp_path / "elsewhere")
        running.signal(signal.SIGCONT)

    words = [trained.get(word, word) for word in VERBS[verb][0]]
    done = verb_run(*words, "--max_steps", "8", home=tmp_path, act=act)
    assert done.code == 1, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("error: out"), done.err
    assert not valid_checkpoints(out)
    assert not (out / "adapter").exists()
    assert not broken_checkpoints(tmp_path / "elsewhere")


#: words, seconds of CPU
EXPERIMENTS = {
    "glue": (["glue", *GLUE], 2.0),
    "nlg": (["nlg", *NLG], 1.5),
    "decode": (["nlg", *DECODE], 1.0),
    "extract": (["extract", "CHECKPOINT", "--base", "ENCODER", "--lora_alpha", "16"], 0.6),
}
EXPERIMENTS = {name: each for name, each in EXPERIMENTS.items() if has_verb(each[0][0])}


@pytest.mark.skipif(not LONG, reason="two runs for each signal; test_glue_train.py stops one")
@pytest.mark.parametrize("verb", EXPERIMENTS)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("attempt", range(3))
def test_experiment_that_was_stopped_or_held_up_ends_as_one_that_was_not(
    verb, number, attempt, verb_run, experiments, tmp_path
):
    words, seconds = EXPERIMENTS[verb]
    words = [experiments.get(word, word) for word in words]
    words += ["--output_dir", "out"] if verb == "extract" else []
    words += ["--resume_from_checkpoint", "auto"] if verb in ("glue", "nlg") else []
    done = disturbed(verb_run, words, tmp_path, verb, number, attempt, seconds)
    for checkpoint in tmp_path.glob("out/**/manifest.json"):
        read_manifested(checkpoint.parent)
    out, output = tmp_path / "out", tmp_path / "o"
    if done.code == 0 and verb == "extract":
        return  # it does not write over what is there
    again = verb_run(*words, home=tmp_path)
    assert again.code == 0, f"{done.code} {done.err} {again.err}"
    if verb == "decode":
        lines = output.read_text(encoding="utf-8").splitlines()
        assert len([json.loads(line) for line in lines]) == 4
        return
    name = "adapter_model.safetensors"
    adapter = out / name if verb == "extract" else out / "adapter" / name
    whole = {"nlg": "NLG"}.get(verb, "GLUE")
    same_bits(adapter, Path(experiments[whole]) / "adapter" / name)
    left = [path for path in tmp_path.rglob("*") if path.name.endswith((".tmp", ".old"))]
    assert not left
