"""Commands of the README and the quick start run as they stand, on the bundled model and data.

Hub models give way to the bundled one, and trainings are cut to two steps. The installation and
what others' programs do is left out. With ``DSCHAT_LORA_TESTS=all`` every other document follows.
"""

import json
import re
import shlex
import shutil
import subprocess

import pytest

from dschat_lora.assets import BUNDLED_DATA
from helpers.addons import of_the_whole
from helpers.launcher import ROOT
from helpers.step1 import write_jsonl

pytestmark = [pytest.mark.stage, of_the_whole]

DOCS = ROOT / "docs"
MAIN = ROOT / "dschat_lora" / "__main__.py"
SHORT = "--max_steps 2 --eval_iters 1 --sample_generations 1"
SHORTENED = {
    "sft": f"{SHORT} --per_device_train_batch_size 2 --lora_dim 16",
    "reward": "--max_steps 2 --eval_iters 1 --per_device_train_batch_size 2",
    "dpo": "--max_steps 2 --eval_iters 1 --per_device_train_batch_size 2 "
    "--no-precompute_ref_log_probs",
    "rlhf": "--max_steps 2 --eval_prompts 2 --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 --max_answer_seq_len 8",
}
HUB = re.compile(r"--model_name_or_path (Qwen|facebook)/\S+ ?")
SCRIPT = re.compile(r"^(?:deepspeed|python) training/step\d_(\w+)/main.py")
# Typed in chats; a server is stopped once it listens.
TYPED = "What is 2 plus 3?\n"


def blocks(document):
    """Fenced blocks of a document, those of Python left out."""
    text = (ROOT / document).read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [b for kind, b in fences if not kind and not b.startswith(("import ", "from "))]


def commands(document):
    """Words of each ``dschat-lora`` command of a document; its scripts count as their verbs."""
    for block in blocks(document):
        for line in re.sub(r"<<'(\w+)'.*?^\1$", "", block, flags=re.M | re.S).splitlines():
            line = SCRIPT.sub(r"dschat-lora \1", HUB.sub("", line))
            if line.startswith("dschat-lora "):
                yield shlex.split(line, comments=True)[1:]


def write_files(document, home):
    """Write what a document's ``cat`` commands write."""
    for block in blocks(document):
        for command in re.findall(r"^cat .*?^EOT$", block, re.MULTILINE | re.DOTALL):
            subprocess.run(["bash", "-c", command], cwd=home, check=True)


def run(launcher, home, verb, *words):
    """Run a verb, shortened; a chat is asked one question, a server stopped when it listens."""
    resumes = "--resume_from_checkpoint" in words or "--dry_run" in words
    words = [*words, *([] if resumes else SHORTENED.get(verb, "").split())]
    running = launcher.start(
        [verb, *words], home, script=MAIN, listening=verb == "chat", env={"HF_HUB_OFFLINE": 1}
    )
    if verb == "chat":
        running.inputs[0].write(f"{TYPED}/quit\n")
    if verb == "serve":
        while "http://127.0.0.1" not in running.out():
            assert running.codes() == [None], running.output()
        running.kill()
        return running
    assert running.wait() == [0], f"{verb} {words}\n{running.output()}"
    return running


@pytest.fixture(scope="module")
def readme(tmp_path_factory, launcher):
    """The directory in which the README's commands ran, and each command with what it printed."""
    home = tmp_path_factory.mktemp("readme")
    write_files("README.md", home)
    said = [(words, run(launcher, home, *words).out()) for words in commands("README.md")]
    return home, said


def test_commands_of_the_readme_run_one_after_another(readme):
    home, said = readme
    verbs = [words[0] for words, _ in said]
    assert verbs == ["audit", "plan", "sft", "chat", "reward", "dpo", "rlhf", "sft"]
    for left in ("sft/adapter", "reward/adapter", "dpo/adapter", "rlhf/actor/adapter"):
        assert (home / "output" / left / "adapter_model.safetensors").is_file()


def forty(*answers):
    """Forty rows of a question, with these columns of answers."""
    asked = [{"prompt": f"What is {n} plus 3?"} for n in range(40)]
    return [
        row | {name: f" {n + i}." for i, name in enumerate(answers)} for n, row in enumerate(asked)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "verbs"),
    [
        (None, ["sft", "chat", "reward", "chat", "rlhf", "chat", "merge"]),
        (forty("completion"), ["sft", "chat", "merge"]),
        (forty("chosen", "rejected"), ["sft", "chat", "reward", "chat", "rlhf", "chat", "merge"]),
    ],
    ids=["the bundled data", "forty answers", "forty pairs"],
)
def test_commands_that_runs_name_as_next_run_in_order(rows, verbs, launcher, tmp_path):
    waiting, ran = [["sft"]], []
    if rows is not None:
        write_jsonl(tmp_path / "rows.jsonl", rows)
        waiting[0] += ["--data_path", "rows.jsonl"]
    while waiting:
        words = waiting.pop(0)
        ran.append(words[0])
        _, _, after = run(launcher, tmp_path, *words).out().partition("next:\n")
        waiting += [
            shlex.split(line)[1:] for line in re.findall(r"^  (dschat-lora .*)", after, re.M)
        ]
    assert ran == verbs


@pytest.mark.thorough
def test_the_readmes_rows_are_learnt_as_it_says(launcher, tmp_path):
    def trained(path, measure, kind):
        words = ["sft", "--data_path", path, "--num_train_epochs", "60", "--lora_dim", "16"]
        running = launcher.start(
            [*words, "--output_dir", path[:-6]], tmp_path, script=MAIN, env={"HF_HUB_OFFLINE": 1}
        )
        assert running.wait() == [0], running.output()
        assert "  warning      " not in running.out()
        lines = (tmp_path / path[:-6] / "metrics.jsonl").read_text("utf-8").splitlines()
        values = [line[measure] for line in map(json.loads, lines) if line["kind"] == kind]
        return values[0], values[-1]

    write_files("README.md", tmp_path)
    before, after = trained("mine.jsonl", "loss", "train")
    assert before == pytest.approx(5.3, abs=0.05)
    assert after == pytest.approx(0.03, abs=0.01)
    sums = [{"prompt": f"What is {a} plus 3?", "completion": f" {a + 3}."} for a in range(50)]
    write_jsonl(tmp_path / "fifty.jsonl", sums)
    before, after = trained("fifty.jsonl", "perplexity", "eval")
    assert before == pytest.approx(272, rel=0.01)
    assert after == pytest.approx(2.4, abs=0.2)


@pytest.mark.thorough
def test_commands_of_the_quick_start_run_one_after_another(readme, launcher, tmp_path):
    """But for those of the README; the demo, which has tests of its own, has written its runs."""
    home, said = readme
    shutil.copytree(home / "output", tmp_path / "output" / "demo")
    shutil.copytree(home / "output" / "sft", tmp_path / "output" / "sft")
    write_files("docs/quick_start.md", tmp_path)
    known = [words for words, _ in said]
    new = [words for words in commands("docs/quick_start.md") if words not in known]
    verbs = ["chat", "serve", "sft", "generate", "sft", "sft", "sft"]
    assert [words[0] for words in new] == verbs
    for words in new:
        run(launcher, tmp_path, *words, *(["--port", "0"] if words[0] == "serve" else []))


# Commands that name what no test has: other data, longer models, checkpoints, programs, servers.
ELSEWHERE = re.compile(
    r"\.\.\.|\b[A-Z]{3,}\b|hostfile|--num_gpus|--include|llama_cpp|extract|accept|glue|nlg|demo|opt-|"
    r"llama-|[\w-]+/[A-Z]|[\w-]+-[\w-]+/|[A-Z]\w+/|org/|me/|openai/|output/rules|output/asks|"
    r"output/mine --resume|output/right|rlhf-2|gpu-2|web/|--tasks|^tinker|^tune|^pipeline qwen3|"
    r"_len (?:2048|65536)|step-0|judge:|my_|labelled|lengths|brief|brevity"
)
# What documents call files of rows, as the README's or as pairs.
ROWS = ("data.jsonl", "held_out.jsonl", "prompts.jsonl", "answers.jsonl", "questions.jsonl")
PAIRS = ("pairs.jsonl", "output/sft/votes.jsonl")
TUTORIALS = ("grpo_with_a_python_reward.md", "addons/environments.md", "quick_start.md")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "document",
    sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}.difference(TUTORIALS)),
)
def test_commands_of_a_document_run(document, readme, launcher, tmp_path):
    """Stages as far as ``--dry_run`` goes; what needs other files than those here is left out."""
    home, _ = readme
    shutil.copytree(home / "output", tmp_path / "output")
    for name in ("mine.jsonl", *ROWS):
        shutil.copy(home / "mine.jsonl", tmp_path / name)
    for name in PAIRS:
        pairs = BUNDLED_DATA["eval"].read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(pairs[:8]), encoding="utf-8")
    write_files(f"docs/{document}", tmp_path)
    more = dict.fromkeys(SHORTENED, "--dry_run") | {"merge": "--overwrite_output_dir"}
    for words in commands(f"docs/{document}"):
        if not ELSEWHERE.search(" ".join(words)):
            run(launcher, tmp_path, *words, *more.get(words[0], "").split())
