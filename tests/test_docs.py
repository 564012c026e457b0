"""Commands that the documentation shows can be typed as they stand."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from dschat_lora.__main__ import VERBS, path_of
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.addons import SEAMS, verbs
from dschat_lora.config.options import chosen_verb, option_aliases, option_names, parse_config
from helpers.addons import of_the_whole

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
# Verbs of the stage scripts.
SCRIPTS = {
    **{"step1_sft": "sft", "step2_reward": "reward", "step2_dpo": "dpo", "step3_rlhf": "rlhf"},
    **{"nlg_gpt2": "nlg", "nlu_glue": "glue"},
}
NLG = ("", "decode", "format", "evaluate")


def config_of(verb, kind=""):
    """The class of a verb's options, None where the verb takes its arguments apart itself."""
    if verb in STAGES:
        return STAGES[verb].config
    try:
        path = path_of(verb)
    except ValueError as error:
        pytest.skip(str(error))
    module = import_module(path.partition(":")[0])
    return vars(module).get(f"{(kind or verb).capitalize()}Config")


_LAUNCHER = r"(?:deepspeed|torchrun|python3?)"
_COMMAND = re.compile(_LAUNCHER + r"\s+(?:--\S+\s+(?:\d\S*\s+)?)*training/(\w+)/main\.py")


def documents():
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    found += sorted((ROOT / "configs").glob("**/*.md"))
    return [path for path in found if path.is_file()]


_FILE = re.compile(r"cat > (\S+) <<'EOT'\n(.*?)EOT", re.DOTALL)


def commands():
    """(stage, arguments, files) of each quoted command; lines that go on are joined."""
    for path in documents():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            for quoted in [line.strip(), *re.findall(r"`([^`]+)`", line)]:
                match = _COMMAND.match(quoted.removeprefix("$ "))
                if match and "..." not in quoted:
                    arguments = quoted.removeprefix("$ ")[match.end() :].split(" #")[0]
                    files = {name: body for name, body in _FILE.findall(text) if name in arguments}
                    yield pytest.param(match[1], arguments, files, id=f"{path.name}:{quoted[:60]}")


@of_the_whole
@pytest.mark.parametrize(("stage", "arguments", "files"), commands())
def test_quoted_command_parses(stage, arguments, files, tmp_path, monkeypatch):
    for name, body in files.items():  # that the page writes before
        (tmp_path / name).write_text(body)
        monkeypatch.chdir(tmp_path)
    script = ROOT / "training" / stage / "main.py"
    assert script.is_file(), f"{script} does not exist"
    verb = SCRIPTS[stage]
    kind, argv = chosen_verb(shlex.split(arguments), NLG if verb == "nlg" else ("",))
    parse_config(config_of(verb, kind), argv)
    if "--deepspeed_config" in argv:
        assert (ROOT / argv[argv.index("--deepspeed_config") + 1]).is_file()


def test_commands_are_found_in_every_form():
    for text in (
        "deepspeed training/step1_sft/main.py --lora_dim 8",
        "deepspeed --num_gpus 2 training/step1_sft/main.py",
        "deepspeed --num_gpus=2 --master_port 29501 training/step1_sft/main.py",
        "python training/step1_sft/main.py",
        "torchrun --nproc_per_node 2 training/step1_sft/main.py",
    ):
        assert _COMMAND.match(text)


@of_the_whole
@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/exactness.md"])
def test_quoted_files_of_the_checkout_exist(name):
    """A name without a folder lies in that of the name before it."""
    gone, folder = [], ROOT
    for quoted in re.findall(r"`([\w./-]+)`", (ROOT / name).read_text(encoding="utf-8")):
        if quoted.startswith(("dschat_lora/", "tests/", "training/", "configs/", "benchmarks/")):
            folder = ROOT / quoted if quoted.endswith("/") else (ROOT / quoted).parent
            gone += [quoted] * (not (ROOT / quoted).exists())
        elif quoted.endswith(".py") and "/" not in quoted and quoted != "__init__.py":
            gone += [f"{folder.name}/{quoted}"] * (not (folder / quoted).exists())
    assert not gone


@of_the_whole
def test_modules_and_names_of_the_walk_through_the_code_exist():
    """A module without a folder lies in that of the one before it."""
    package, gone, folder = ROOT / "dschat_lora", [], ROOT
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## Where things are")[0]
    walk = "".join(re.findall(r"^\|.*", page, re.MULTILINE))
    code = "\n".join(path.read_text("utf-8") for path in package.rglob("*.py"))
    defined = {*SEAMS, *re.findall(r"(?:class|def) (\w+)", code)}
    for quoted in re.findall(r"`([\w./]+)`", walk):
        if quoted.endswith(".py"):
            folder = (package / quoted).parent if "/" in quoted else folder
            gone += [quoted] * (not (folder / quoted.rpartition("/")[2]).is_file())
        elif "/" not in quoted and quoted != "metrics.jsonl":
            gone += [name for name in quoted.split(".") if name not in defined]
    assert len(defined) > 1000
    assert not gone


# Options of verbs that take their arguments apart themselves, and those of launchers.
OWN = {
    "rollouts": {"best", "worst", "prompt", "contains", "changed", "limit", "json"},
    "pipeline": {"dry_run"},
    "plan": {"for", "num_gpus", "json"},
    "doctor": {"json", "no_training"},
    "extract": {"base", "lora_alpha", "enable_lora", "output_dir"},
}
# Of the add-on that docs/extending.md writes, which has a test of its own.
WRITTEN = ("dschat-lora lengths notes.txt", "dschat-lora sft --brevity_words 20")
LAUNCHER = {"num_gpus", "include", "hostfile", "master_port", "config", "help"}


def verb_commands():
    """(verb, arguments) of each ``dschat-lora`` command, in lines of their own or quoted."""
    found = {}
    for path in documents():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            for quoted in [line.strip(), *re.findall(r"`([^`]+)`", line)]:
                match = re.match(r"(?:\$ )?dschat-lora ([a-z]+)( .*)?$", quoted)
                if match and quoted not in WRITTEN:
                    found.setdefault(quoted, pytest.param(*match.groups(""), id=quoted[:70]))
    return found.values()


@of_the_whole
@pytest.mark.parametrize(("verb", "arguments"), verb_commands())
def test_options_of_a_quoted_verb_exist(verb, arguments):
    assert verb in (*VERBS, *verbs())
    configs = [config_of(verb, kind) for kind in (NLG if verb == "nlg" else ("",))]
    if verb in ("plan", "tune"):
        configs += [stage.config for stage in STAGES.values()]
    known = OWN.get(verb, set()).union(
        *({*option_names(each), *option_aliases(each)} for each in configs if each)
    )
    assert known or verb in ("demo", "models", "recipes", "report", "accept"), verb
    for name in re.findall(r"(?<!\S)--(\w+)", arguments.split(" #")[0]):
        assert name in known | LAUNCHER, f"dschat-lora {verb} has no --{name}"


# ---------------------------------------------------------------------------- figures

RESULTS = ROOT / "benchmarks" / "results"
# Raw material of a result, of which no figure is quoted.
_RAW = {"works", "step_seconds_all", "losses", "loss_runs", "versions", "git_commit"}


def results(name):
    return json.loads((RESULTS / name).read_text("utf-8"))


def numbers(value, key=""):
    """Numbers of a result, with those that say the same in the unit that a text gives."""
    if isinstance(value, dict):
        for name in value.keys() - _RAW:
            # What is aimed at stands in the names of the checks.
            inner = (
                [float(n.replace(",", "")) for n in written(" ".join(value[name]))]
                if name == "checks"
                else value[name]
            )
            yield from numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, key)
    elif type(value) in (int, float):
        also = {"peak_mib": value / 1024, "mfu": 100 * value, "mfu_measured": 100 * value}
        yield from (value, also.get(key, value))
        if key == "x_ours_median":
            yield 1 / value


def written(text):
    """Numbers of a text as they are written, but those of names, links and code."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    return re.findall(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?!\w|[.,-]?\w)", text)


def is_rounded_from(text, known):
    digits = len(text.partition(".")[2])
    return any(f"{each:,.{digits}f}".replace(",", "") == text.replace(",", "") for each in known)


def test_figures_are_read_and_compared_as_they_are_rounded():
    text = "OPT-1.3B at rank 16: 70,551 tokens/s, 2.77 [2.7, 2.88], `x 5`, 22.8 GiB; 64-bit."
    assert written(text) == ["16", "70,551", "2.77", "2.7", "2.88", "22.8"]
    assert is_rounded_from("70,551", [70550.96])
    assert is_rounded_from("2.4", [2.35])
    assert not is_rounded_from("2.5", [2.40])
    assert not is_rounded_from("2.8", [2.7])
    assert list(numbers({"works": [1], "a": [{"b": True}, 2]})) == [2, 2]
    assert list(numbers({"peak_mib": 2048})) == [2048, 2]
    assert list(numbers({"checks": {"at least 65,000 tokens": True}})) == [65000, 65000]


def measured(name, part, **wanted):
    """Rows of a part's cases that have these values."""
    rows = results(name)[part]["cases"]
    return [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]


def both_ends(values, digits):
    low, high = (f"{each(values):,.{digits}f}" for each in (min, max))
    return f"{low} to {high}"


def test_what_the_readme_calls_fast_is_what_the_linked_results_say():
    """Both ends of each range over all cases of a part, and no figure besides."""
    said = re.search(r"^\* \*\*Fast(.*?)^\* \*\*", README, re.DOTALL | re.MULTILINE)[1]
    said = " ".join(said.split())
    h200, chat = "nvidia-h200.json", "DeepSpeed-Chat's way"
    assert f"(benchmarks/results/{h200})" in said
    training = "throughput-1.3b"
    peft = [row["x_ours_median"] for row in measured(h200, training, case="PEFT")]
    theirs = [row["x_ours_median"] for row in measured(h200, training, case=chat)]
    ppo = [row["times_ours"]["median"] for row in measured(h200, "ppo", contender=chat)]
    peak = [row["peak_mib"] / 1024 for row in measured(h200, "ppo", contender="ours")]
    (peak_of_chat,) = {row["peak_mib"] / 1024 for row in measured(h200, "ppo", contender=chat)}
    claims = [
        f"{both_ends(peft, 2)} times as fast as PEFT's",
        f"{min(theirs):.2f} (no padding) to {max(theirs):.2f} times as fast",
        f"PPO is {both_ends(ppo, 1)} times as fast",
        f"takes {both_ends(peak, 1)} GiB against {peak_of_chat:.1f}",
    ]
    for claim in claims:
        assert claim in said
    assert written(said) == [number for claim in claims for number in written(claim)]


def tables(path, heading, until=None):
    """Rows of the tables between two headings, without their heads."""
    text = (ROOT / path).read_text("utf-8").split(heading)[1].split(until or "\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {i + j for i, line in enumerate(lines) if line.startswith("|---") for j in (-1, 0)}
    return [line for i, line in enumerate(lines) if i not in heads]


def unrecorded(row, recorded):
    known = list(numbers(recorded))
    return [each for each in written(row) if not is_rounded_from(each, known)]


def test_each_figure_of_the_comparison_is_in_the_result_that_its_row_names():
    page = "benchmarks/speed.md"
    found, result = {}, None
    for row in tables(page, "On one H200", "On two or fewer"):
        if part := re.search(r"`benchmarks/gpu.sh ([\w.-]+)`", row):
            result = results("nvidia-h200.json")[part[1]]
        found[row] = unrecorded(row, result)
    for row in tables(page, "On two or fewer"):
        (name,) = re.findall(r"`([\w-]+\.json)` \|$", row)
        result = results(name)
        found[row] = unrecorded(row, result["grpo"] if name == "stated.json" else result)
    assert len(found) == 19
    assert {row: lost for row, lost in found.items() if lost} == {}


@pytest.mark.parametrize(
    ("page", "begin", "end", "source"),
    [
        ("comparison", "## Speed and memory", "[All figures", "speed"),
        ("scaling", "By calculation", "If the base fits", "scaling"),
    ],
)
def test_figures_that_a_page_quotes_are_in_the_tables_it_links_to(page, begin, end, source):
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8").split(begin)[1].split(end)[0]
    known = written((ROOT / "benchmarks" / f"{source}.md").read_text("utf-8"))
    assert len(written(text)) > 8
    assert set(written(text)) <= set(known)


@pytest.mark.parametrize(
    ("heading", "until", "names"),
    [
        ("`results/cpu-pairs.json`", "**sft.**", "cpu-pairs"),
        ("`results/cpu-sft.json` is", "**decode.**", "cpu-sft"),
        ("`results/cpu-decode.json`", "**ppo.**", "cpu-decode"),
        ("`results/cpu-ppo.json`", "**throughput.**", "cpu-ppo"),
        ("## Figures of a GPU", None, "nvidia-h200 nvidia-h100-80gb-hbm3 stated"),
        ("## Preparation of data", None, "stated"),
        ("## GRPO beside TRL", None, "stated"),
    ],
)
def test_each_figure_of_the_benchmarks_tables_is_recorded(heading, until, names):
    recorded = [results(f"{name}.json") for name in names.split()]
    found = {
        row: unrecorded(row, recorded) for row in tables("benchmarks/README.md", heading, until)
    }
    assert found
    assert {row: lost for row, lost in found.items() if lost} == {}
