"""Every verb whose disk is full at one of its writes: one line, and nothing half under its name."""

import hashlib
import re
import shutil
from functools import cache
from typing import NamedTuple

import pytest
from harness import DECODE, GLUE, LONG, NLG, RLHF, TINY, evenly, operations

from dschat_lora.assets import BUNDLED_DATA
from helpers.addons import has_verb

pytestmark = pytest.mark.stage

DATA = str(BUNDLED_DATA["eval"])
STAGED = re.compile(r"\.(tmp|partial|old|deleted)$|^\.o\.\d+$")
CONVERTER = """
import sys
with open(sys.argv[sys.argv.index("--outfile") + 1], "w") as file:
    file.write("converted")
"""


class Write(NamedTuple):
    """What a verb writes: its command, and what is in the paths."""

    words: list[str]
    place: str
    points: int = 2  # of the long run
    kept: str = ""  # what was there, and must stay as it was


WRITES = {
    "prepared data": Write(["sft", *TINY, "--data_output_path", "cache"], "/cache", 6),
    "pairs": Write(["reward", *TINY, "--data_output_path", "cache"], "/cache"),
    "log-probabilities": Write(["dpo", *TINY, "--data_output_path", "cache"], "/cache"),
    "adapter": Write(["sft", *TINY], "/out/.adapter", 6),
    "merged model": Write(["sft", *TINY, "--merge_adapter"], "/out/.model"),
    "run.json": Write(["sft", *TINY], "/out/run.json"),
    "metrics": Write(["rlhf", *RLHF], "/out/metrics.jsonl"),
    "rollouts": Write(["rlhf", *RLHF], "/out/rollouts", 6),
    "step 3": Write(["rlhf", *RLHF, "--save_interval", "1"], "/out/", 6),
    "merge": Write(["merge", "SFT", "--output_dir", "m"], "/.m.tmp", 6, "m"),
    "merge over a model": Write(
        ["merge", "SFT", "--output_dir", "there", "--overwrite_output_dir"],
        "/.there.tmp",
        1,
        "there",
    ),
    "generate": Write(
        ["generate", "SFT", "--data_path", DATA, "--max_new_tokens", "2", "--output_path", "o"],
        "/.o.",
        4,
        "o",
    ),
    "score": Write(["score", "REWARD", DATA, "--output_path", "o"], "/.o.", 3, "o"),
    "report": Write(["report", "SFT", "--output_path", "r.html"], "/.r.html", 3, "r.html"),
    "audit": Write(["audit", DATA, "--html", "a.html"], "/.a.html", 3, "a.html"),
    "accept": Write(["accept", "adapter"], "/adapter/", 3, "adapter"),
}
RECIPE = """
output_dir: p
stages:
  sft:
    lora_dim: 4
    max_steps: 1
    eval_iters: 1
    sample_generations: 0
    max_seq_len: 64
"""
# In the long run alone.
MORE = {
    "glue": Write(["glue", *GLUE], "/out/", 10),
    "glue adapter": Write(["glue", *GLUE], "/out/.adapter", 3),
    "glue predictions": Write(["glue", *GLUE], "/out/.predict", 3),
    "glue results": Write(["glue", *GLUE], "_results.json", 6),
    "nlg": Write(["nlg", *NLG], "/out/", 8),
    "nlg factors": Write(["nlg", *NLG], "/out/lora", 4),
    "decode": Write(["nlg", *DECODE], "/.o.", 3, "o"),
    "extract": Write(
        ["extract", "CHECKPOINT", "--base", "ENCODER", "--lora_alpha", "16", "--output_dir", "e"],
        "/.e.",
        4,
        "e",
    ),
    "pipeline": Write(["pipeline", "recipe.yaml"], "/p/.pipeline.json", 3),
}
EVERY = {name: each for name, each in (WRITES | MORE).items() if has_verb(each.words[0])}


def contents(path):
    """Digests of a file, or of those of a directory, by name."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def runs(trained, request):
    """The runs by the words that stand for them."""
    return trained | (request.getfixturevalue("experiments") if LONG else {})


@pytest.fixture(scope="module")
def room(runs, verb_run, tmp_path_factory):
    """``room(name)``: a home with what the write meets there, and the writes of a whole run."""

    def furnished(name):
        home = tmp_path_factory.mktemp("home")
        (home / "o").write_text("earlier")
        (home / "r.html").write_text("earlier")
        (home / "a.html").write_text("earlier")
        (home / "recipe.yaml").write_text(RECIPE)
        if name == "accept":
            shutil.copytree(f"{runs['SFT']}/adapter", home / "adapter")
        if name == "merge over a model":
            done = verb_run("merge", runs["SFT"], "--output_dir", "there", home=home)
            assert done.code == 0, done.err
        return home

    @cache
    def writes(name):
        home, write = furnished(name), EVERY[name]
        words = [runs.get(word, word) for word in write.words]
        log = home / "log"
        done = verb_run(*words, home=home, FAULT_PATH=write.place, FAULT_LOG=log)
        assert done.code == 0, done.err
        calls = [o for o in operations(log) if o.call not in ("unlink", "rmdir", "rename", "chmod")]
        assert calls, f"{name}: nothing is written below {write.place}"
        return calls

    return furnished, writes


# What found something.
CHOSEN = ("prepared data", "merge", "audit", "accept")


@pytest.mark.parametrize("name", EVERY if LONG else [name for name in CHOSEN if name in EVERY])
def test_full_disk_at_a_write_is_one_line_and_leaves_no_half(name, room, verb_run, runs):
    furnished, writes = room
    write = EVERY[name]
    words = [runs.get(word, word) for word in write.words]
    for operation in evenly(writes(name), write.points if LONG else 1):
        home = furnished(name)
        kept = contents(home / write.kept) if write.kept else None
        done = verb_run(
            *words,
            home=home,
            FAULT_PATH=write.place,
            FAULT_AT=operation.number,
            FAULT_DO="ENOSPC",
            FAULT_STICKY=1,
        )
        about = f"{operation}\n{done.code} {done.out}{done.err}"
        if operation.call in ("fsync", "fdatasync", "mkdir") and done.code == 0:
            continue  # a disk that is full syncs, and a directory may be there
        # 2: where an option names the place
        assert done.code == (2 if "--data_output_path cache cannot" in done.err else 1), about
        assert len(done.err.splitlines()) == 1, about
        assert re.match("error: .*(No space left on device|is the disk full)", done.err), about
        assert "damaged" not in done.err, about
        assert "Traceback" not in done.err, about
        assert not done.left, about
        assert kept is None or contents(home / write.kept) == kept, about
        staged = [path for path in home.rglob("*") if STAGED.search(path.name)]
        assert not staged, about
        for final in ("out/adapter", "out/model", "out/actor/adapter"):
            path = home / final
            assert not path.exists() or (path / "tokenizer.json").is_file(), about
