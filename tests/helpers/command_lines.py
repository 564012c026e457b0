"""Every verb's table of options, and what becomes of a command line short of importing torch."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import signal
import socket
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dschat_lora import __main__ as program
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.commands import train
from dschat_lora.commands.launch import LauncherConfig
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.addons import installed, load
from dschat_lora.config.options import flatten, option_aliases, option_fields
from dschat_lora.config.parser import Parser
from dschat_lora.config.values import is_switch, switch_words, value_shape
from dschat_lora.config.verbs import GenerateConfig, MergeConfig
from dschat_lora.runtime import stage_main
from helpers.addons import of_addon
from helpers.step1 import write_adapter_config, write_jsonl

HANGS_AFTER = 60  # seconds
REFUSED = object()  # stands for a value that must not be taken
MODEL, DATA = str(BUNDLED_MODEL), str(BUNDLED_DATA["train"])


@dataclass(frozen=True)
class Command:
    """The words of a verb, the class of its options if they are one, and words that it needs."""

    words: tuple[str, ...]
    config: type | None = None
    needed: tuple[str, ...] = ()

    @property
    def verb(self):
        return self.words[0]

    @property
    def is_launched(self):
        """Whether options of DeepSpeed's launcher may stand among its own."""
        return self.verb in (*STAGES, "glue") or self.words == ("nlg", "train")


def _of_addon(addon, words, needed=""):
    """The verb ``words`` of an add-on, or of the class of options; none if it is not installed."""
    name, _, is_class = addon.partition(".")
    configs = of_addon(addon) if is_class else [None] * (name in installed())
    return [Command(tuple(words.split()), each, tuple(needed.split())) for each in configs]


COMMANDS = (
    *(Command((name,), stage.config) for name, stage in STAGES.items()),
    *_of_addon("nlg.config:NlgConfig", "nlg train", "--data_path e2e.txt"),
    *_of_addon("nlg.config:DecodeConfig", "nlg decode", "--data_path e2e.txt"),
    *_of_addon(
        "nlg.config:FormatConfig",
        "nlg format",
        "--predictions p.jsonl --output_ref_file r --output_pred_file h",
    ),
    *_of_addon("nlg.config:EvaluateConfig", "nlg evaluate", "--predictions p.jsonl"),
    *_of_addon(
        "glue.config:GlueConfig",
        "glue",
        f"--model_name_or_path {MODEL} --task_name cola --data_dir cola",
    ),
    *_of_addon("pipeline", "pipeline", "recipe.yaml"),
    *_of_addon("pipeline", "recipes"),
    *_of_addon("demo", "demo"),
    *_of_addon("planning.config:ModelsConfig", "models", MODEL),
    *_of_addon("audit.config:AuditConfig", "audit"),
    *(
        Command(("plan", name), stage.config)
        for name, stage in STAGES.items()
        if "planning" in installed()
    ),
    *_of_addon("planning", "plan", "recipe.yaml"),
    *_of_addon("planning", "tune sft", "--rates 1e-3"),
    *_of_addon("planning", "doctor"),
    *_of_addon("report", "report", "run"),
    *_of_addon("report", "rollouts", "run"),
    *_of_addon("inspect.describe:InspectConfig", "inspect", "adapter"),
    *_of_addon("serving.config:ChatConfig", "chat", MODEL),
    *_of_addon("serving.config:ServeConfig", "serve", f"{MODEL} --port 0"),
    *_of_addon("tinker.config:TinkerConfig", "tinker", f"{MODEL} --port 0"),
    Command(("merge",), MergeConfig, ("adapter",)),
    Command(("generate",), GenerateConfig, (MODEL, "Hello.")),
    *_of_addon("evaluation.config:EvalConfig", "eval", f"{MODEL} {DATA}"),
    *_of_addon("evaluation.config:ScoreConfig", "score", "reward pairs.jsonl"),
    *_of_addon("publish.config:PushConfig", "push", "adapter me/mine --dry_run"),
    *_of_addon("publish.config:ExportConfig", "export", "adapter"),
    *_of_addon("loralib", "extract", f"adapter --base {MODEL}"),
    *_of_addon("inspect", "accept", "copy"),
)
# Modules of which verbs run functions and classes before they reach what they are for.
CHECKING = {
    path.partition(":")[0] for stage in STAGES.values() for path in (stage.options, stage.checks)
} | {"addons.pipeline.run"}
# Exit code 1 is their answer, beside what they print.
ANSWERING = ("export", "inspect", "plan", "doctor", "audit")


def make_home(home):
    """Fill a directory with what drawn command lines name, and with nothing else."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / "file.txt").write_text("some text\n")
    (home / "e2e.txt").write_text("name[A]||A is it.\nname[B]||B is it.\n")
    (home / "hostile.jsonl").write_text('{"prompt": 1}\n')
    (home / "rows.csv").write_text("prompt,completion\nx,y\n")
    write_jsonl(home / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    write_jsonl(home / "p.jsonl", [{"prediction": "a", "references": ["b"], "id": 0}])
    (home / "directory").mkdir()
    (home / "directory" / "train.jsonl").write_bytes(BUNDLED_DATA["train"].read_bytes())
    (home / "cola").mkdir()
    for name in ("train", "dev"):
        (home / "cola" / f"{name}.tsv").write_text("a\t1\t\tgood one\nb\t0\t\tbad one\n")
    for name in ("adapter", "copy", "run/adapter"):
        write_adapter_config(home / name)
    write_adapter_config(home / "reward", task_type="SEQ_CLS", modules_to_save=["score"])
    (home / "run" / "run.json").write_text('{"status": "finished", "stage": "sft"}')
    (home / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (home / "options.yaml").write_text("seed: 1\n")
    (home / "recipe.yaml").write_text("output_dir: o\nstages:\n  sft:\n    lora_dim: 4\n")
    (home / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')


@dataclass(frozen=True)
class Option:
    """A row of a verb's table of options."""

    name: str
    kind: type  # bool, int, float or str
    choices: tuple = ()  # of a switch, words such as on, off and auto
    many: bool = False
    names: tuple[str, ...] = ()  # itself, and other spellings
    dest: str = ""  # by which name it arrives
    has_no: bool = False  # --no-NAME too

    def value(self, word):
        """What a word says, by Python's own rules; REFUSED where that is nothing."""
        if self.kind is bool:
            return {"on": True, "off": False}.get(word, word) if word in self.choices else REFUSED
        try:
            value = self.kind(word)
        except ValueError:
            return REFUSED
        is_bad = value != value or value in (float("inf"), -float("inf"), "")
        return REFUSED if is_bad or (self.choices and value not in self.choices) else value


@cache
def option_table(command):
    """The options of a command, as its class of options, or its own parser, has them."""
    if command.config is None:
        return tuple(_of_parser(command))
    classes = (command.config, LauncherConfig) if command.is_launched else (command.config,)
    return tuple(
        _of_field(name, annotation, option_aliases(each))
        for each in classes
        for name, (_, annotation) in option_fields(each).items()
    )


def _of_field(name, annotation, aliases):
    names = (name, *(old for old, new in aliases.items() if new == name))
    if annotation is bool:
        return Option(name, bool, names=names, dest=name, has_no=True)
    if is_switch(annotation):
        return Option(name, bool, tuple(switch_words(annotation)), names=names, dest=name)
    kind, choices, many = value_shape(annotation)
    return Option(name, kind, choices, many, names, name)


class _FoundError(Exception):
    """Ends a verb once its parser is known."""


def _of_parser(command):
    found = []

    def catch(parser, *_):
        found.append(parser)
        raise _FoundError

    with replaced((Parser, "parse_known_args", catch)), contextlib.suppress(_FoundError):
        verb = command.verb
        load(program.path_of(verb))([*command.words[1:], *command.needed])
    for action in found[0]._actions:
        name = action.option_strings[0].removeprefix("--") if action.option_strings else "-h"
        if name != "-h":
            kind = bool if action.nargs == 0 else action.type or str
            if not isinstance(kind, type):  # a conversion; the word for a value tells of what
                kind = {"N": int, "X": float}.get(action.metavar, str)
            yield Option(name, kind, (), action.nargs in ("*", "+"), (name,), action.dest)


@dataclass(frozen=True)
class Typed:
    """Words of one option, and the value that they say."""

    option: Option
    words: tuple[str, ...]
    value: object


@dataclass(frozen=True)
class Line:
    """A command line, what is typed in it, and the files that it names."""

    command: Command
    typed: tuple[Typed, ...] = ()
    extra: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # name and content

    @property
    def argv(self):
        names = {f"--{name}" for each in self.typed for name in each.option.names}
        kept, skips = [], False
        for word in self.command.needed:  # unless it is typed otherwise
            skips = word in names if word.startswith("--") else skips
            word = "drawn" if word == "recipe.yaml" and self.files else word
            kept += [] if skips else [word]
        own = [word for each in self.typed for word in each.words]
        return [*self.command.words, *kept, *own, *self.extra]


@dataclass
class Outcome:
    """How a command line ended."""

    code: int | None = None
    out: str = ""
    err: str = ""
    error: str = ""  # a traceback
    calls: list = field(default_factory=list)  # of what is imported late: its arguments
    written: set = field(default_factory=set)


class _ReachedError(Exception):
    """Ends a verb where its heavy part would begin."""


class _Listening(contextlib.nullcontext):
    """In place of a socket that listens."""

    def setsockopt(self, *_):
        """Nothing."""


@contextlib.contextmanager
def replaced(*attributes):
    """Inside the block, attributes ``(owner, name, value)`` have these values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def run_line(line):
    """The outcome of ``dschat-lora ...`` in this process and the working directory."""
    for name, text in line.files:
        Path(name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return outcome_of(["dschat-lora", *line.argv], program.main)


def outcome_of(argv, main, *, whole=False):
    """The outcome of ``main`` by ``argv``: ``whole``, or short of what is imported late."""
    outcome, before = Outcome(), _files()
    # What is imported for the whole may take longer on a busy machine.
    with contextlib.nullcontext() if whole else _in_one_minute():
        _run(argv, main, outcome, whole)
    outcome.written = _files() - before
    return outcome


def _run(argv, main, outcome, whole):
    # As the streams of a terminal: lone surrogates can be written to the second alone.
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )

    def reach(*values, **named):
        outcome.calls.append((values, named))
        raise _ReachedError

    real = stage_main.load_late

    def load(path):
        module, _, _ = path.partition(":")
        return real(path) if whole or module in CHECKING else reach

    def listen(where, **_):
        where[0].encode("idna")
        if where[0] not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
            raise socket.gaierror(-2, "Name or service not known")  # without asking the network
        return _Listening()

    try:
        with (
            replaced(
                (sys, "argv", argv),
                (warnings, "formatwarning", warnings.formatwarning),  # which a command sets
                (stage_main, "load_late", load),
                (train, "launch_stage", reach),
                *(
                    (seeds, name, reach)
                    for seeds in of_addon("loralib.seeds")
                    for name in ("launch_stage", "run_seeds")
                ),
                *((each, "alone", reach) for each in of_addon("pipeline.run")),
                (socket, "create_server", listen),
            ),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except _ReachedError:
        pass
    except SystemExit as ended:
        outcome.code = ended.code
    except BaseException:  # noqa: BLE001
        outcome.error = traceback.format_exc()
    outcome.out, outcome.err = (each.buffer.getvalue().decode() for each in (out, err))


@contextlib.contextmanager
def _in_one_minute():
    def hang(*_):
        raise AssertionError(f"no end after {HANGS_AFTER} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANGS_AFTER)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _files():
    return {(each, path) for each, _, paths in os.walk(".") for path in (*paths, "")}


def faults_of(line, outcome):
    """What is wrong with how a line ended, a sentence each."""
    if outcome.error:
        return [outcome.error]
    if outcome.calls or outcome.code in (None, 0):
        return list(_lost(line, outcome))
    if outcome.code == 1 and line.command.verb in ANSWERING:
        return []
    found = []
    if not outcome.err.startswith("error: ") or outcome.err.count("\n") != 1:
        found.append(f"it ends in more or less than one line: {outcome.err!r}")
    if not _is_named(line, outcome.err):
        found.append(f"the message names nothing that was typed: {outcome.err!r}")
    if outcome.written:
        found.append(f"a line that is refused writes {sorted(outcome.written)}")
    return found


def _is_named(line, words):
    """Whether a message names an option, or something that was typed."""
    typed = [part for word in line.argv for part in word.split("=", 1) if part.strip("-/ ")]
    names = [name for option in option_table(line.command) for name in option.names]
    names += ["OUT", "RUN", "unknown option -", "unexpected argument"]
    names += [name for name, _ in line.files]
    if any(each.startswith("~") for each in typed) and ("~" in words or str(Path.home()) in words):
        return True
    if re.search(r"[\w./]+\.(jsonl|csv|txt):\d+: ", words):
        return True
    # Long ones are cut, and control characters are not printed as they are.
    return any(name in words for name in (*names, *(repr(each)[1:-1][:100] for each in typed)))


def _lost(line, outcome):
    """Values that were typed and are others, or none, in what the verb is called with."""
    if not outcome.calls or {"-h", "--help"} & set(line.argv):
        return
    values, named = outcome.calls[-1]
    config = next((each for each in values if dataclasses.is_dataclass(each)), None)
    if isinstance(config, LauncherConfig) and line.command.verb in ("nlg", "glue"):
        return  # the processes that are launched read the other options
    for each in line.typed:
        if each.value is REFUSED:
            yield f"{each.words!r:.200} was taken"
    arrived = named if config is None else flatten(config)
    if line.command.words[0] == "plan" and line.command.config is not None:
        arrived = values[1]
    for name, each in {each.option.name: each for each in line.typed}.items():
        found = arrived.get(name, arrived.get(each.option.dest, each.value))
        found = tuple(found) if isinstance(found, list) else found
        is_same = found == each.value and isinstance(found, bool) == isinstance(each.value, bool)
        if not is_same and not _is_settled(line, each, found):
            yield f"{each.words!r:.200} arrived as {found!r:.200}"


def _is_settled(line, typed, found):
    """Whether an option may be another one than was typed, as its documentation says."""
    name = typed.option.name
    return (
        typed.value == ()  # as if it were not there
        or name == "report_to"  # none beside nothing else
        or (name == "enable_lora" and set(found) == set(typed.value))  # in the order q, k, v
        or (name == "sft_only_data_path" and line.command.verb in ("reward", "dpo"))  # by a note
        or (name == "output_path" and line.command.words == ("nlg", "decode"))  # in --work_dir
        or (name == "output_dir" and line.command.words == ("demo",))  # of a stage, within it
        or (typed.option.many and found[: len(typed.value)] == typed.value)  # with a stray word
        or (name == "set" and typed.value == tuple(found[-len(typed.value) :]))  # adds up
    )
