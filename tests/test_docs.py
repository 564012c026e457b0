"""Commands that the documentation shows can be typed as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from dschat_lora import __main__ as command
from dschat_lora.config.options import chosen_verb, option_aliases, option_names, parse_config
from dschat_lora.config.stages import (
    AuditConfig,
    DpoStageConfig,
    RewardStageConfig,
    ScoreConfig,
    SupervisedConfig,
)
from dschat_lora.config.verbs import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    MergeConfig,
    PushConfig,
    TuneConfig,
)
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.nlg.config import (
    DecodeConfig,
    EvaluateConfig,
    FormatConfig,
    NlgConfig,
)
from dschat_lora.rl.config import DistillConfig, RlhfConfig
from dschat_lora.serving.config import ChatConfig, ServeConfig
from dschat_lora.tinker.config import TinkerConfig

ROOT = Path(__file__).resolve().parents[1]
# Configuration class of each stage script, by its verb.
STAGES = {
    "step1_sft": {"": SupervisedConfig},
    "step2_reward": {"": RewardStageConfig},
    "step2_dpo": {"": DpoStageConfig},
    "step3_rlhf": {"": RlhfConfig},
    "nlg_gpt2": {
        "": NlgConfig,
        "decode": DecodeConfig,
        "format": FormatConfig,
        "evaluate": EvaluateConfig,
    },
    "nlu_glue": {"": GlueConfig},
}
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


@pytest.mark.parametrize(("stage", "arguments", "files"), commands())
def test_quoted_command_parses(stage, arguments, files, tmp_path, monkeypatch):
    for name, body in files.items():  # that the page writes before
        (tmp_path / name).write_text(body)
        monkeypatch.chdir(tmp_path)
    script = ROOT / "training" / stage / "main.py"
    assert script.is_file(), f"{script} does not exist"
    verb, argv = chosen_verb(shlex.split(arguments), list(STAGES[stage]))
    parse_config(STAGES[stage][verb], argv)
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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
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


VERBS = {
    **{verb: STAGES[stage][""] for verb, stage in (
        ("sft", "step1_sft"), ("reward", "step2_reward"), ("dpo", "step2_dpo"),
        ("rlhf", "step3_rlhf"), ("glue", "nlu_glue"),
    )},
    "distill": DistillConfig,
    "audit": AuditConfig, "merge": MergeConfig, "generate": GenerateConfig, "eval": EvalConfig,
    "score": ScoreConfig, "push": PushConfig, "export": ExportConfig, "inspect": InspectConfig,
    "chat": ChatConfig, "serve": ServeConfig, "tinker": TinkerConfig,
}  # fmt: skip
_STAGE_CONFIGS = (SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig)
# Options of verbs that take their arguments apart themselves, and those of launchers.
OWN = {
    "rollouts": {"best", "worst", "prompt", "contains", "changed", "limit", "json"},
    "nlg": set().union(*map(option_names, STAGES["nlg_gpt2"].values())),
    "pipeline": {"dry_run"},
    "plan": {"for", "num_gpus", "json"}.union(*map(option_names, _STAGE_CONFIGS)),
    "tune": {*option_names(TuneConfig)}.union(*map(option_names, _STAGE_CONFIGS)),
    "doctor": {"json", "no_training", "first_hour"},
    "extract": {"base", "lora_alpha", "enable_lora", "output_dir"},
}
LAUNCHER = {"num_gpus", "include", "hostfile", "master_port", "config", "help"}


def verb_commands():
    """(verb, arguments) of each ``dschat-lora`` command, in lines of their own or quoted."""
    found = {}
    for path in documents():
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            for quoted in [line.strip(), *re.findall(r"`([^`]+)`", line)]:
                match = re.match(r"(?:\$ )?dschat-lora ([a-z]+)( .*)?$", quoted)
                if match:
                    found.setdefault(quoted, pytest.param(*match.groups(""), id=quoted[:70]))
    return found.values()


@pytest.mark.parametrize(("verb", "arguments"), verb_commands())
def test_options_of_a_quoted_verb_exist(verb, arguments):
    assert verb in command.VERBS
    known = OWN.get(verb, set())
    if (config := VERBS.get(verb)) is not None:
        known = {*option_names(config), *option_aliases(config)}
    for name in re.findall(r"(?<!\S)--(\w+)", arguments.split(" #")[0]):
        assert name in known | LAUNCHER, f"dschat-lora {verb} has no --{name}"


def test_the_page_of_the_training_loop_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "own_training_loop.py").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "own_training_loop.md").read_text(encoding="utf-8")
    assert f"```python\n{example}```\n" in page
