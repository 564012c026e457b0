"""Command lines drawn from the option tables of the verbs, and what becomes of them."""

import contextlib
import dataclasses
import io
import os
import signal
import socket
import sys
import traceback
import typing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from hypothesis import strategies as st

from dschat_lora import __main__ as program
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.config.options import _option_fields, flatten, option_aliases
from dschat_lora.config.parser import Parser
from dschat_lora.config.stages import AuditConfig, ScoreConfig
from dschat_lora.config.values import is_switch, switch_words, value_shape
from dschat_lora.config.verbs import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    MergeConfig,
    PushConfig,
)
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.nlg.config import DecodeConfig, EvaluateConfig, NlgConfig
from dschat_lora.experiments.nlg.scorer_files import FormatConfig
from dschat_lora.pipeline import stage_verbs
from dschat_lora.pipeline.launch import LauncherConfig
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.runtime import stage_main
from dschat_lora.serving import address, verbs as serving_verbs
from dschat_lora.serving.config import ChatConfig, ServeConfig

from helpers.fuzz_home import HOSTILE_DS, HOSTILE_YAML

HANGS_AFTER = 60  # seconds
REFUSED = object()  # in place of a value that must not be taken


@dataclass(frozen=True)
class Command:
    """A verb, the words that it needs, and the class of its options, if they are one."""

    words: tuple[str, ...]
    config: type | None = None
    needed: tuple[str, ...] = ()

    @property
    def verb(self):
        return self.words[0]


MODEL, DATA = str(BUNDLED_MODEL), str(BUNDLED_DATA["train"])
COMMANDS = (
    *(Command((name,), stage.config) for name, stage in STAGES.items()),
    Command(("nlg", "train"), NlgConfig, ("--data_path", "e2e.txt")),
    Command(("nlg", "decode"), DecodeConfig, ("--data_path", "e2e.txt")),
    Command(
        ("nlg", "format"),
        FormatConfig,
        ("--predictions", "p.jsonl", "--output_ref_file", "r", "--output_pred_file", "h"),
    ),
    Command(("nlg", "evaluate"), EvaluateConfig, ("--predictions", "p.jsonl")),
    Command(
        ("glue",),
        GlueConfig,
        ("--model_name_or_path", MODEL, "--task_name", "cola", "--data_dir", "cola"),
    ),
    Command(("pipeline",), None, ("recipe.yaml",)),
    Command(("demo",)),
    Command(("recipes",)),
    Command(("audit",), AuditConfig),
    *(Command(("plan", name), stage.config) for name, stage in STAGES.items()),
    Command(("plan",), None, ("recipe.yaml",)),
    Command(("doctor",)),
    Command(("report",), None, ("run",)),
    Command(("rollouts",), None, ("run",)),
    Command(("inspect",), InspectConfig, ("adapter",)),
    Command(("chat",), ChatConfig, (MODEL,)),
    Command(("serve",), ServeConfig, (MODEL, "--port", "0")),
    Command(("merge",), MergeConfig, ("adapter",)),
    Command(("generate",), GenerateConfig, (MODEL, "Hello.")),
    Command(("eval",), EvalConfig, (MODEL, DATA)),
    Command(("score",), ScoreConfig, ("reward", "pairs.jsonl")),
    Command(("push",), PushConfig, ("adapter", "me/mine", "--dry_run")),
    Command(("export",), ExportConfig, ("adapter",)),
    Command(("extract",), None, ("adapter", "--base", MODEL)),
    Command(("accept",), None, ("copy",)),
)


@dataclass(frozen=True)
class Option:
    """A row of a verb's option table."""

    name: str
    kind: type  # bool, int, float or str
    choices: tuple = ()
    many: bool = False
    words: tuple[str, ...] = ()  # of a switch with more than on and off
    names: tuple[str, ...] = ()  # it, and other spellings
    dest: str = ""


class _Shown(Exception):
    pass


@cache
def option_table(command):
    """The options of a command, as its own parser or its class of options has them."""
    if command.config is not None:
        return _of_class(command.config)
    found = []

    def catch(parser, *_):
        found.append(parser)
        raise _Shown

    before, Parser.parse_known_args = Parser.parse_known_args, catch
    try:
        program.VERBS[command.verb].run([*command.words[1:], *command.needed])
    except _Shown:
        pass
    finally:
        Parser.parse_known_args = before
    return tuple(
        Option(
            action.option_strings[0].removeprefix("--"),
            bool if action.nargs == 0 else action.type or str,
            many=action.nargs in ("*", "+"),
            names=(action.option_strings[0].removeprefix("--"),),
            dest=action.dest,
        )
        for action in found[0]._actions
        if action.option_strings and "-h" not in action.option_strings
    )


def _of_class(config):
    rows = []
    for name, (_, annotation) in _option_fields(config):
        names = (name, *(old for old, new in option_aliases(config).items() if new == name))
        if is_switch(annotation):
            words = () if annotation is bool else tuple(switch_words(annotation))
            rows.append(Option(name, bool, words=words, names=names, dest=name))
        else:
            kind, choices, many = value_shape(annotation)
            rows.append(Option(name, kind, choices, many, names=names, dest=name))
    return tuple(rows)


@dataclass(frozen=True)
class Typed:
    """Words of one option, and the value that they say; REFUSED where they say none."""

    option: Option
    words: tuple[str, ...]
    value: object


HOSTILE = (
    *("", " ", "\t", "\n", "a\nb", "\0", "a\0b", "\udcff", "x\udc80.jsonl", "\ud83d", "\U0001f600"),
    *("-", "--", "---", "-x", "-1", "-1e-4", "-0", "-0.0", "-inf", "=", "a=b", "=b", "a="),
    *("nan", "NaN", "inf", "infinity", "1e400", "1e309", "-1e400", "1e-400", "1e308", "1e30"),
    *("9" * 30, "9" * 400, "9" * 5000, str(2**31), str(2**63), str(2**64), str(-(2**63))),
    *("1_000", "\u0661\u0662", "\uff11", "0x10", "1.0", "1,5", "+3", " 3 ", "3\n", "1e3", "010"),
    *("None", "null", "true", "False", "on", "off", "auto", "yes", "[]", "{}", "{", '{"a": 1}'),
    *("[" * 2000, '{"a":' * 2000, '{"a": 1, "a": 2}', '{"messages": 1}', '{"a": NaN}'),
    *("~", "~nobody_at_all/x", "~/x", ".", "..", "/", "/dev/null", "/nowhere/x", "a" * 300),
    *("a/" * 3000, "file.txt", "file.txt/x", "directory", "directory/x", "missing.jsonl"),
    *("%s", "%(prog)s", "{0}", "$HOME", "*", "?", "[", "[a", "**", "org/name", "org/name:a:b:c"),
    *("builtin:", "builtin:nothing", ":", "a:", ":b", "a:b:c", "json:loads", "..:x", "a.b:c", ".:x"),
    *("(", "*+", "a|", "\\", "q", "none none", "prompt=", "prompt=question", "prompt=a=b", "<b>"),
    *("host:0", "@", "\u202e", "\x1b[2J", "\r", "\x85", "\u2028", "0", "1", "-1", "0.0"),
)
FITTING = {
    int: ("0", "1", "2", "3", "4", "8", "16", "64", "100", "512"),
    float: ("0", "0.0", "0.05", "0.1", "0.5", "0.9", "1", "1.0", "2", "1e-4", "5e-5", "10"),
    str: ("x", "name", "two words", "directory", "file.txt", "new", "new/deeper"),
}
# Texts that an option with such a name may take.
MEANT = {
    "model_name": (MODEL, "adapter", "run", "reward", "org/name", "directory", "base"),
    "models": (MODEL, "adapter", "base", "run"),
    "reward_model": ("reward", MODEL),
    "lora_path": ("adapter", "run"),
    "adapter_path": ("adapter/adapter_model.safetensors",),
    "path": ("adapter", "run", MODEL),
    "data": (DATA, "pairs.jsonl", "rows.csv", "directory", "*.jsonl", "e2e.txt", "hostile.jsonl"),
    "_file": ("rows.csv", "p.jsonl", "e2e.txt", "file.txt"),
    "data_dir": ("cola",),
    "data_split": ("2,4,4", "1,0,0", "0,0,0", "1,2", "1,-1,1", "nan,1,1", "1,1,inf", "a,b,c"),
    "columns": ("prompt=prompt", "completion=completion", "text=body", "chosen=a"),
    "function": ("builtin:exact_match", "builtin:length", "json:loads", "module:function"),
    "deepspeed": ("zero2", "zero3", "ds.json", "hostile.json"),
    "chat_template": ("template.jinja", "file.txt"),
    "kwargs": ('{"enable_thinking": false}', "{}"),
    "target_modules": ("q_proj", "v_proj", "all-linear", ".*q_proj"),
    "resume": ("latest", "auto", "run"),
    "output_dir": ("new", "run", "directory", "file.txt"),
    "output_path": ("new.jsonl", "directory/new.jsonl"),
    "config": ("options.yaml", "hostile.yaml", "recipe.yaml", "opt-1.3b"),
    "host": ("127.0.0.1", "localhost", "::1", "0.0.0.0", "a..b", "evil.example", "127.0.0.1#x"),
    "for": ("24GB", "H100", "80", "0GB", "-1GB", "1e400GB", "nanGB", "GB", "none"),
    "set": ("sft.seed=1", "sft.seed=", "sft.seed=[1]", "dpo.seed=1", "sft.lora_dim=!!int ''"),
    "from": ("sft", "reward", "nothing"),
    "enable_lora": ("q", "k", "v"),
    "stop_tokens": ("2", "<|endoftext|>"),
    "for_": (),
}


def texts_for(name):
    """Texts that fit an option's name."""
    fitting = [each for part, texts in MEANT.items() if part in name for each in texts]
    return tuple(fitting) or FITTING[str]


def words_of(option, *, fits=False):
    """Words for a value of an option: most of them fit, some are hostile."""
    if option.words:
        fitting = option.words
    elif option.choices:
        fitting = tuple(map(str, option.choices))
    elif option.kind is str:
        fitting = texts_for(option.name)
    else:
        fitting = FITTING[option.kind]
    drawn = {
        int: st.integers(-(2**65), 2**65).map(str),
        float: st.floats().map(repr),
        bool: st.nothing(),
        str: st.text(max_size=8).map(str),
    }[option.kind]
    if fits:
        return st.sampled_from(fitting)
    return st.one_of(st.sampled_from(fitting), st.sampled_from(HOSTILE), drawn)


@st.composite
def typed_options(draw, option, *, fits=False):
    """One option as a person may type it."""
    name = f"--{draw(st.sampled_from(option.names))}"
    if option.kind is bool and not option.words:
        if option.dest != option.name or option.name in ("json", "dry_run", "no_training"):
            return Typed(option, (name,), True)
        on = draw(st.booleans())
        return Typed(option, (name if on else name.replace("--", "--no-", 1),), on)
    if option.many:
        words = draw(st.lists(words_of(option, fits=fits), max_size=3))
        values = [said(option, word) for word in words]
        value = REFUSED if REFUSED in values else tuple(values)
        if any(is_flag(word) for word in words):
            if len(words) == 1:
                return Typed(option, (f"{name}={words[0]}",), value)
            value = REFUSED  # taken for an option
        return Typed(option, (name, *words), value)
    word = draw(words_of(option, fits=fits))
    if is_flag(word) or draw(st.integers(0, 3)) == 0:
        return Typed(option, (f"{name}={word}",), said(option, word))
    return Typed(option, (name, word), said(option, word))


def is_flag(word):
    return word.startswith("-")


def said(option, word):
    """The value that a word says, by Python's own rules; REFUSED where there is none."""
    if option.words:
        return {"on": True, "off": False}.get(word, word) if word in option.words else REFUSED
    try:
        value = option.kind(word)
    except ValueError:
        return REFUSED
    if isinstance(value, float) and abs(value) in (float("inf"),) or value != value:
        return REFUSED
    return value if not option.choices or value in option.choices else REFUSED


@dataclass(frozen=True)
class Line:
    """A command line, and what was typed in it."""

    command: Command
    typed: tuple[Typed, ...]
    extra: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # name and content of files that it names

    @property
    def argv(self):
        needed = self.command.needed
        own = [word for each in self.typed for word in each.words]
        # Words that a line needs come first, unless they are typed otherwise.
        names = {f"--{name}" for each in self.typed for name in each.option.names}
        kept, skips = [], False
        for word in needed:
            if word.startswith("--"):
                skips = word in names
            if not skips:
                kept.append(word)
        return [*self.command.words, *kept, *own, *self.extra]


EXTRA = (
    *(("--",), ("--help",), ("-h",), ("--config", "options.yaml"), ("--config", "hostile.yaml")),
    *(("--config", "missing"), ("--config", "\0"), ("--config", ""), ("--config", "directory")),
    *(("stray",), ("-x",), ("--nothing",), ("--nothing=1",), ("--local_rank=0",), ("--=",)),
    *(("--num_gpus", "0"), ("--master_port", "x"), ("--hostfile", "\0"), ("--",  "--seed", "1")),
    *(("--see", "1"), ("--lora-dim", "4"), ("--LORA_DIM", "4"), ("--lora_dim=4=5",), ("",), ("\0",)),
    *(("\udcff",), ("--\udcff", "1"), ("--config", "ints.yaml"), ("--config", "deep.yaml")),
)


@st.composite
def lines(draw, commands=COMMANDS):
    """A command line of a verb."""
    command = draw(st.sampled_from(commands))
    table = option_table(command)
    chosen = draw(st.lists(st.sampled_from(table), max_size=4)) if table else []
    # One value at most is hostile, so that the others are looked at.
    hostile = draw(st.integers(0, 2 * len(chosen)))
    typed = tuple(draw(typed_options(o, fits=n != hostile)) for n, o in enumerate(chosen))
    extra = draw(st.sampled_from(EXTRA)) if draw(st.integers(0, 5)) == 0 else ()
    files = ()
    if draw(st.integers(0, 4)) == 0:
        if command.config is None:
            files = (("recipe.yaml", draw(yaml_texts(command))),)
            extra = ()
        elif draw(st.booleans()) and any("deepspeed" in option.name for option in table):
            name = "deepspeed" if command.config is GlueConfig else "deepspeed_config"
            files, extra = (("drawn.json", draw(ds_texts())),), (f"--{name}=drawn.json",)
        else:
            files, extra = (("drawn.yaml", draw(yaml_texts(command))),), ("--config", "drawn.yaml")
    return Line(command, typed, extra, files)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.text(max_size=5),
    st.sampled_from(HOSTILE), st.dates(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0,2)), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def yaml_texts(draw, command):
    """A file of options, valid but for its values, or a hostile text."""
    import yaml
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(HOSTILE_YAML))
    recipe = command.config is None or draw(st.integers(0, 3)) == 0
    stage = draw(st.sampled_from(list(STAGES)))
    config = STAGES[stage].config if recipe else command.config
    chosen = draw(st.lists(st.sampled_from(_of_class(config)), min_size=1, max_size=3))
    content = {}
    for option in chosen:
        word = draw(words_of(option)) if option.kind is not bool or option.words else "true"
        value = draw(st.one_of(st.just(word), SCALARS, VALUES))
        if option.kind is not str and isinstance(value, str) and draw(st.booleans()):
            with contextlib.suppress(ValueError):
                value = option.kind(value)
        content[option.name] = value
    if recipe:
        content = {"output_dir": "o", "stages": {stage: content}}
        if draw(st.integers(0, 3)) == 0:
            content[draw(st.sampled_from(("common", "launcher", "stages", "output_dir", "x")))] = draw(VALUES)
    try:
        return yaml.safe_dump(content, allow_unicode=draw(st.booleans()))
    except (UnicodeEncodeError, ValueError, yaml.YAMLError):
        return draw(st.sampled_from(HOSTILE_YAML))


@st.composite
def ds_texts(draw):
    import json
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(HOSTILE_DS))
    names = ("train_batch_size","train_micro_batch_size_per_gpu","gradient_accumulation_steps","gradient_clipping","zero_optimization","bf16","fp16","optimizer","scheduler","tensorboard","tensor_parallel","autotp_size","steps_per_print","zero_optimisation","")
    inner = ("stage","enabled","offload_optimizer","offload_param","device","type","params","lr","zero_hpz_partition_size","zero_quantized_gradients","x","loss_scale")
    leaf = st.one_of(SCALARS.filter(lambda x: not hasattr(x, "year")), st.sampled_from(["auto", "cpu", "nvme", "none", 0, 1, 2, 3, True, False]))
    value = st.recursive(leaf, lambda v: st.one_of(st.lists(v, max_size=2), st.dictionaries(st.sampled_from(inner), v, max_size=3)), max_leaves=6)
    content = draw(st.dictionaries(st.sampled_from(names), value, min_size=1, max_size=3))
    return json.dumps(content)


@dataclass
class Outcome:
    """How a line ended."""

    code: int | None = None
    out: str = ""
    err: str = ""
    error: str = ""  # a traceback
    calls: list = field(default_factory=list)  # of what is imported late: name, values, named
    written: set = field(default_factory=set)


class _Reached(Exception):
    pass


class _Recorder:
    """Stands for a module that is imported late: its functions record how they are called."""

    def __init__(self, calls, name):
        self._calls, self._name = calls, name

    def __getattr__(self, name):
        def call(*values, **named):
            self._calls.append((f"{self._name}:{name}", values, named))
            raise _Reached

        return call


@contextlib.contextmanager
def _replaced(*attributes):
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _hangs(*_):
    raise AssertionError(f"no end after {HANGS_AFTER} s")


def run_line(line):
    """The outcome of ``dschat-lora ARGV`` in this process, up to where torch would be imported."""
    outcome = Outcome()
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors, write_through=True)
        for errors in ("strict", "backslashreplace")
    )

    def launched(*values, **named):
        outcome.calls.append(("launch", values, named))
        raise _Reached

    def server(where, **_):
        # As the real one, but for the look-up of names in the network.
        host, port = where
        host.encode("idna")
        if host not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
            raise socket.gaierror(-2, "Name or service not known")
        return contextlib.nullcontext()

    argv = line.argv
    for name, text in line.files:
        Path(name).write_text(text, encoding="utf-8", errors="surrogatepass")
    before = _files()
    timer = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_AFTER)
    try:
        with (
            _replaced(
                (sys, "argv", ["dschat-lora", *argv]),
                (stage_main, "_import", lambda name: _Recorder(outcome.calls, name)),
                (stage_verbs, "launch_stage", launched),
                (program, "launch_stage", launched),
                (program, "run_seeds", launched),
                (address.socket, "create_server", server),
            ),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            program.main()
    except _Reached:
        pass
    except SystemExit as ended:
        outcome.code = ended.code
    except BaseException:
        outcome.error = traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, timer)
    outcome.written = _files() - before
    outcome.out, outcome.err = (
        stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)
    )
    return outcome


def _files():
    return {(each, path) for each, _, paths in os.walk(".") for path in (*paths, "")}


# Options that a check resolves, although they were typed.
RESOLVED = {"report_to"}


def judge(line, outcome):
    """What is wrong with the outcome of a line: kind and detail of each fault."""
    if outcome.error:
        last = outcome.error.strip().split("\n")
        where = [each.strip() for each in last if each.strip().startswith("File") and "dschat" in each]
        yield "traceback", f"{last[-1][:70]} @ {where[-1].split('dschat_lora/')[-1] if where else ''}"
        return
    if outcome.calls or outcome.code in (None, 0):
        yield from _not_arrived(line, outcome)
        return
    if outcome.code == 1 and line.command.verb in ("export", "inspect", "plan", "doctor", "audit"):
        return  # its answer is no
    words = outcome.err.removeprefix("error: ")
    if not outcome.err.startswith("error: ") or outcome.err.count("\n") != 1:
        yield "form", f"{outcome.code} {outcome.err!r}"
        return
    if not _names_something(line, words):
        yield "unnamed", words[:150]
    if outcome.written:
        yield "written", f"{sorted(outcome.written)} {words[:100]}"


def _names_something(line, words):
    typed = [word.partition("=") for word in line.argv]
    parts = [part for triple in typed for part in (triple[0], triple[2]) if len(part.strip("-")) > 1]
    names = [name for option in option_table(line.command) for name in option.names]
    names += ["OUT", "no verb", "unknown option -", "argument ''", *(name for name, _ in line.files)]
    if any(name in words for name in (*names, *parts)):
        return True
    if "begins with ~" in words:
        return any(word.startswith("~") for word in parts)
    shown = [ascii(part)[1:-1] for part in parts]
    return any(name in words for name in shown)


def _not_arrived(line, outcome):
    last = {each.option.name: each for each in line.typed if each.option.names[0] != "set"}
    if line.command.words == ("reward",) or line.command.words == ("dpo",):
        last.pop("sft_only_data_path", None)  # a note says that it has no effect
    if outcome.code == 0 or "--help" in line.argv or "-h" in line.argv:
        return
    refused = [each.words for each in line.typed if each.value is REFUSED]
    if refused:
        yield "taken", f"{refused[0]!r:.150}"
        return
    if not outcome.calls:
        return
    _, values, named = outcome.calls[-1]
    config = next((each for each in values if dataclasses.is_dataclass(each)), None)
    if config is not None:
        arrived = flatten(config)
    elif outcome.calls[-1][0] == "launch":
        return
    elif line.command.words[0] == "plan" and len(values) > 1 and values[1] is not None:
        arrived = values[1]
    else:
        arrived = named
    for name, each in last.items():
        if each.value == ():
            continue
        if each.option.name in RESOLVED:
            continue
        key = name if name in arrived else each.option.dest
        if key not in arrived:
            continue
        value = arrived[key]
        value = tuple(value) if isinstance(value, list) else value
        if value != each.value or isinstance(value, bool) != isinstance(each.value, bool):
            yield "changed", f"{name}: typed {each.words!r} arrived {value!r}"
    repeated = [each.option.name for each in line.typed]
    again = {name for name in repeated if repeated.count(name) > 1}
    for name in again:
        values = {each.value for each in line.typed if each.option.name == name}
        if len(values) > 1:
            if last[name].option.many:
                yield "repeated", f"{'many' if last[name].option.many else 'one'}"
