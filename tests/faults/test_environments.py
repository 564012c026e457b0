"""Every verb where streams, variables, limits, paths or directories are not what one expects.

What a case must show: the exit code, one line on the standard error where that is not 0, no
traceback, an end within a minute, no process and no half-written file that is left.
"""

import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from harness import LONG, RLHF, TINY, comparable_metrics

from dschat_lora.assets import BUNDLED_DATA
from helpers.addons import has_verb, of_the_whole
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage

DATA = str(BUNDLED_DATA["eval"])
#: SFT, REWARD and PPO stand for runs
VERBS = {
    "sft": ["sft", *TINY],
    "reward": ["reward", *TINY],
    "dpo": ["dpo", *TINY],
    "rlhf": ["rlhf", *RLHF],
    "merge": ["merge", "SFT", "--output_dir", "m"],
    "generate": ["generate", "SFT", "hello"],
    "score": ["score", "REWARD", DATA],
    "eval": ["eval", "SFT", DATA],
    "audit": ["audit", DATA],
    "plan": ["plan", "sft"],
    "inspect": ["inspect", "SFT"],
    "report": ["report", "SFT", "--output_path", "r.html"],
    "rollouts": ["rollouts", "PPO"],
    "recipes": ["recipes"],
    "chat": ["chat", "SFT"],
    "help": ["--help"],
    "version": ["--version"],
    "mistake": ["sft", "--nosuch"],
}
VERBS = {name: words for name, words in VERBS.items() if words[0][0] == "-" or has_verb(words[0])}
TRAINING = ("sft", "reward", "dpo", "rlhf")
STAGED = re.compile(r"\.(tmp|partial|old|deleted)$|\.o\.jsonl\.\d+$")


class Fault(NamedTuple):
    """A case: a verb in an environment, and how it ends."""

    verb: str
    prepare: str = ""  # see verb.py
    code: int | tuple[int, ...] = 0
    says: str = ""  # in the line on the standard error
    more: tuple[str, ...] = ()  # further words of the command line
    silent: bool = False  # the standard error is not there
    noisy: bool = False  # torch or tqdm warn before they raise


def streams():
    """Standard streams that are closed, full, or that nobody reads."""
    for verb in VERBS:
        is_training, is_wrong = verb in TRAINING, verb == "mistake"
        code = 2 if is_wrong else 0
        for number, name in enumerate(("input", "output", "errors")):
            yield f"{verb} {name} closed", Fault(verb, f"close({number})", code, silent=number == 2)
        yield f"{verb} all closed", Fault(verb, "close(0); close(1); close(2)", code, silent=True)
        full = code if is_training or is_wrong else 1
        says = "No space left on device" if full == 1 else ""
        is_noisy = verb == "chat"
        fault = Fault(verb, "point(1, '/dev/full')", full, says, noisy=is_noisy)
        yield f"{verb} output full", fault
        yield f"{verb} errors full", Fault(verb, "point(2, '/dev/full')", code, silent=True)
        yield f"{verb} output unread", Fault(verb, "lose_reader(1)", code)
        both = "lose_reader(1); lose_reader(2)"
        yield f"{verb} both unread", Fault(verb, both, code, silent=True)


def encodings():
    """Terminals that cannot show every character."""
    for encoding in ("ascii", "latin-1", "utf-16", "cp1252"):
        prepare = f"sys.stdout.reconfigure(encoding={encoding!r}, errors='strict')"
        for verb, more in {
            "sft": ("--sample_generations", "2", "--data_path", "unicode.jsonl"),
            "rlhf": ("--data_path", "unicode.jsonl"),
            "generate": ("\u00e9\u0142\U0001f600", "--json"),
            "audit": ("unicode.jsonl", "--show", "2"),
            "score": ("unicode.jsonl",),
        }.items():
            yield f"{verb} on {encoding}", Fault(verb, prepare, more=more)


def variables():
    """Variables of the environment that hold what nobody expects."""
    cache = "--data_output_path file/.cache/dschat_lora cannot be written"
    below_a_file = "os.environ['HOME'] = 'file'; os.environ.pop('XDG_CACHE_HOME')"
    for verb in ("sft", "rlhf"):
        yield f"{verb} home below a file", Fault(verb, below_a_file, 2, cache)
    settings = {
        "HOME": (None, "", "/nonexistent", "file"),
        "TMPDIR": ("", "/nonexistent", "file", "/proc"),
        "LC_ALL": ("C", "tr_TR.UTF-8", "xx_YY.latin1"),
        "COLUMNS": ("20", "1", "0", "-5", "word", "99999999999", ""),
        "TERM": (None, "dumb", "word"),
        "PATH": (None, ""),
        "TZ": ("Foo/Bar",),
        "NO_COLOR": ("1",),
        "USER": (None,),
        "SOURCE_DATE_EPOCH": ("-1",),
    }
    for name, values in settings.items():
        for value in values:
            prepare = f"os.environ[{name!r}] = {value!r}"
            if value is None:
                prepare = f"os.environ.pop({name!r}, None)"
            for verb in ("sft", "audit", "generate"):
                yield f"{verb} {name}={value}", Fault(verb, prepare)
    # A rank without a launcher is somebody's variable, not that of a process.
    alone = "os.environ.pop('WORLD_SIZE'); "
    for value in ("16", "1", "word", "-1", ""):
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            prepare = f"{alone}os.environ[{name!r}] = {value!r}"
            yield f"sft {name}={value} alone", Fault("sft", prepare)
            yield f"mistake {name}={value} alone", Fault("mistake", prepare, 2, "error: ")
    launched = {
        "RANK": ("16", "-1", "word"),
        "LOCAL_RANK": ("3", "word"),
        "WORLD_SIZE": ("0", "-1", "word", "1.5", ""),
        "LOCAL_WORLD_SIZE": ("0", "2"),
        "MASTER_PORT": ("0", "-1", "65536", "word"),
    }
    for name, values in launched.items():
        for value in values:
            says = f"error: the environment variable {name} must be a whole number"
            prepare = f"os.environ[{name!r}] = {value!r}"
            yield f"sft {name}={value} launched", Fault("sft", prepare, 2, says)


def limits():
    """Limits of the system on memory, files and their sizes."""
    for verb in (*TRAINING, "merge", "generate", "score", "eval", "audit"):
        for name, megabytes in [("AS", n) for n in (1, 8, 24, 48)] + [("DATA", 4)]:
            fault = Fault(verb, f"limit({name!r}, {megabytes} << 20)", (0, 1), noisy=True)
            yield f"{verb} {megabytes} MB more of {name}", fault
        for number in (4, 12, 20):
            prepare = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({number},) * 2)"
            yield f"{verb} {number} files", Fault(verb, prepare, (0, 1, 2), noisy=True)
    for verb in (*TRAINING, "merge"):
        more = () if verb == "merge" else ("--data_output_path", "cache")
        for size in (1000, 50_000):
            prepare = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size},) * 2)"
            yield f"{verb} files of {size} bytes", Fault(verb, prepare, 1, "File too large", more)
    more = ("--output_dir", "~nobody_here/x")
    yield "sft user without a home", Fault("sft", "", 2, "a path begins with ~ and a name", more)


def directories():
    """Current directories that are gone, or in which nothing can be written."""
    for verb in (*TRAINING, "merge"):
        says = "error: the current directory was removed"
        yield f"{verb} nowhere", Fault(verb, "leave_for_nowhere()", (1, 2), says)
        yield f"{verb} in /proc", Fault(verb, "os.chdir('/proc')", 1, "No such file or directory")
    for verb in ("generate", "eval", "audit", "inspect", "plan"):
        yield f"{verb} nowhere", Fault(verb, "leave_for_nowhere()")
    for mask in (0o077, 0o000, 0o777):
        yield f"sft umask {mask:03o}", Fault("sft", f"os.umask({mask})")
    yield "sft clock set back", Fault("sft", "set_clock(86400 * 365)")


NAMES = {
    "blank": "a b",
    "quotes": "a'b\"c",
    "newline": "a\nb",
    "tab": "a\tb",
    "dash": "-dash",
    "unicode": "\u00fcn\u00ef \u4f60\U0001f600",
    "shell": "a;b$(touch pwned)`x`&|",
    "format": "a%sb{c}",
    "pattern": "a*b[c]?",
    "control": "a\x1b[31mb",
    "backslash": "a\\b",
    "comma": "a,b=c:d#e",
    "250": "d" * 250,
}
REFUSED_NAMES = {
    "bytes": (os.fsdecode(b"a\xff\xfeb"), "in UTF-8, got"),
    "256": ("e" * 256, "too long"),
    "5000": ("/".join(["f" * 200] * 25), "too long"),
    "empty": ("", ""),
    "below a file": ("file/x", ""),
}


def paths():
    """Names of directories and files that a shell or a format may take for something else."""
    for title, name in NAMES.items():
        yield f"sft into {title}", Fault("sft", more=(f"--output_dir={name}",))
        if len(name) < 250:  # with its suffix
            prepare = f"shutil.copy({DATA!r}, {name + '.jsonl'!r})"
            yield f"sft of {title}", Fault("sft", prepare, more=(f"--data_path={name}.jsonl",))
        prepare = f"shutil.copytree(os.environ['SFT'], {name!r})"
        more = (f"--model_name_or_path={name}",)
        yield f"sft on {title}", Fault("sft", prepare, more=more)
        yield f"generate from {title}", Fault("generate", prepare, more=more)
    for title, (name, says) in REFUSED_NAMES.items():
        for option in ("output_dir", "data_path", "model_name_or_path"):
            more = (f"--{option}={name}",)
            yield f"sft --{option} {title}", Fault("sft", "", (1, 2), says or f"--{option}", more)


GROUPS = (streams, encodings, variables, limits, directories, paths)
FAULTS = {name: fault for group in GROUPS for name, fault in group() if fault.verb in VERBS}
# What found something, or guards most.
CHOSEN = """
    sft output closed; generate output closed; help output full; sft all closed;
    score errors full; mistake errors full; sft output unread;
    sft on ascii; generate on ascii; sft home below a file;
    sft RANK=16 alone; mistake RANK=16 alone; sft WORLD_SIZE=word launched;
    merge 24 MB more of AS; sft 1 MB more of AS; merge files of 50000 bytes;
    sft files of 1000 bytes; sft user without a home; sft nowhere;
    sft into newline; sft --output_dir bytes;
    sft --output_dir empty; sft --data_path empty; sft umask 077; sft clock set back
"""
DEFAULT = [name for name in FAULTS if name in [" ".join(n.split()) for n in CHOSEN.split(";")]]


@of_the_whole
def test_every_case_that_is_chosen_exists():
    assert len(DEFAULT) == len(CHOSEN.split(";"))
    assert len(FAULTS) > 400
    assert {fault.verb for fault in FAULTS.values()} == set(VERBS)


@pytest.mark.parametrize("name", FAULTS if LONG else DEFAULT[::2])
def test_a_verb_ends_well_or_with_one_line_wherever_it_runs(name, verb_run, trained, tmp_path):
    fault = FAULTS[name]
    prepare_home(tmp_path)
    words = [trained.get(word, word) for word in (*VERBS[fault.verb], *fault.more)]
    done = verb_run(*words, home=tmp_path, PREPARE=fault.prepare, SFT=trained["SFT"])
    check_end(done, fault)
    if done.code == 0 and fault.verb in TRAINING:
        # A copy of the model may lie there too.
        run = max(tmp_path.rglob("run.json"), key=lambda path: path.stat().st_mtime_ns).parent
        assert len(comparable_metrics(run, kinds=("train",))) == 2
        assert '"status": "finished"' in (run / "run.json").read_text(encoding="utf-8")


@pytest.mark.skipif(not LONG, reason="two interpreters for each")
@pytest.mark.parametrize("verb", ["sft", "merge", "mistake"])
def test_asserts_that_are_off_change_nothing(verb, trained, tmp_path):
    ends = []
    for flag in ("-B", "-O"):
        home = tmp_path / flag
        home.mkdir()
        words = [trained.get(word, word) for word in VERBS[verb]]
        command = [sys.executable, flag, "-m", "dschat_lora", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        environment["XDG_CACHE_HOME"] = str(home / "cache")
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, timeout=120
        )
        kept = {
            path.relative_to(home).as_posix(): path.read_bytes()
            for pattern in ("*.safetensors", "*config.json", "rollouts/*", "tokenizer.json")
            for path in home.rglob(pattern)
        }
        said = re.sub(r"[0-9.,:T+-]+", "", done.stdout)
        ends.append((done.returncode, done.stderr, said, kept))
    assert ends[0] == ends[1]
    assert ends[0][0] == (2 if verb == "mistake" else 0)
    assert ends[0][3] or verb not in (*TRAINING, "merge")


def prepare_home(home):
    (home / "file").write_text("")
    rows = (
        f'{{"prompt": "Wer \u00fcbt? \u4f60\u597d \U0001f600 {n}", "chosen": "Sch\u00f6n {n}", '
        f'"rejected": "n\u00f6 {n}"}}\n'
        for n in range(40)
    )
    (home / "unicode.jsonl").write_text("".join(rows), encoding="utf-8")


def check_end(done, fault):
    codes = fault.code if isinstance(fault.code, tuple) else (fault.code,)
    assert done.code in codes, f"{done.code}\n{done.out}{done.err}"
    assert "Traceback" not in done.out + done.err, done.err
    assert not done.left
    staged = [path for path in done.home.rglob("*") if STAGED.search(path.name)]
    assert not staged, staged
    if done.code and not fault.silent:
        lines = done.err.splitlines()
        assert len(lines) == 1 or fault.noisy, done.err
        assert lines[-1].startswith("error: "), done.err
        assert fault.says in done.err
