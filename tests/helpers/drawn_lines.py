"""Command lines drawn from every verb's table of options, with values that fit and hostile ones."""

import contextlib
import json

import yaml
from hypothesis import strategies as st

from dschat_lora.commands.stages import STAGES
from helpers.command_lines import COMMANDS, DATA, MODEL, REFUSED, Command, Line, Typed, option_table

HOSTILE = (
    *("", " ", "\t", "\n", "a\nb", "\0", "a\0b", "\udcff", "x\udc80.jsonl", "\ud83d", "\U0001f600"),
    *("-", "--", "---", "-x", "-1", "-1e-4", "-0", "-0.0", "-inf", "=", "a=b", "=b", "a="),
    *("nan", "NaN", "inf", "infinity", "1e400", "1e309", "-1e400", "1e-400", "1e308", "1e30"),
    *("9" * 30, "9" * 400, "9" * 5000, str(2**31), str(2**63), str(2**64), str(-(2**63))),
    *("1_000", "\u0661\u0662", "\uff11", "0x10", "1.0", "1,5", "+3", " 3 ", "3\n", "1e3", "010"),
    *("None", "null", "true", "False", "on", "off", "auto", "yes", "[]", "{}", "{", '{"a": 1}'),
    *("[" * 2000, '{"a":' * 2000, '{"a": 1, "a": 2}', '{"messages": 1}', '{"a": NaN}'),
    *("~", "~nobody_at_all/x", "~/x", ".", "..", "/", "/dev/null", "/proc/x/y", "a" * 300),
    *("a/" * 3000, "file.txt", "file.txt/x", "directory", "directory/x", "missing.jsonl"),
    *("%s", "%(prog)s", "{0}", "$HOME", "*", "?", "[", "[a", "**", "org/name", "org/name:a:b:c"),
    *("builtin:", "builtin:nothing", ":", "a:", ":b", "a:b:c", "json:loads", "..:x", ".:x"),
    *("(", "*+", "a|", "\\", "q", "none none", "prompt=", "prompt=question", "prompt=a=b", "<b>"),
    *("host:0", "@", "\u202e", "\x1b[2J", "\r", "\x85", "\u2028", "0", "1", "-1", "0.0"),
)
FITTING = {
    int: ("0", "1", "2", "3", "4", "8", "16", "64", "100", "512"),
    float: ("0", "0.0", "0.05", "0.1", "0.5", "0.9", "1", "1.0", "2", "1e-4", "5e-5", "10"),
}
TEXTS = ("x", "name", "two words", "directory", "file.txt", "new", "new/deeper")
# Texts that options with such a part in their name may take.
MEANT = {
    "model_name": (MODEL, "adapter", "run", "reward", "org/name", "directory", "base"),
    "models": (MODEL, "adapter", "base", "run"),
    "reward_model": ("reward", MODEL),
    "path": ("adapter", "run", MODEL),
    "data": (DATA, "pairs.jsonl", "rows.csv", "directory", "*.jsonl", "e2e.txt", "hostile.jsonl"),
    "_file": ("rows.csv", "p.jsonl", "e2e.txt", "file.txt"),
    "data_dir": ("cola",),
    "data_split": ("2,4,4", "1,0,0", "0,0,0", "1,2", "1,-1,1", "nan,1,1", "1,1,inf", "a,b,c"),
    "columns": ("prompt=prompt", "completion=completion", "text=body", "chosen=a"),
    "function": ("builtin:exact_match", "builtin:length", "json:loads", "module:function"),
    "deepspeed": ("zero2", "zero3", "ds.json"),
    "chat_template": ("template.jinja", "file.txt"),
    "kwargs": ('{"enable_thinking": false}', "{}"),
    "target_modules": ("q_proj", "v_proj", "all-linear", ".*q_proj"),
    "resume": ("latest", "auto", "run"),
    "output_dir": ("new", "run", "directory", "file.txt"),
    "output_path": ("new.jsonl", "directory/new.jsonl"),
    "config": ("options.yaml", "recipe.yaml", "opt-1.3b"),
    "host": ("127.0.0.1", "localhost", "::1", "0.0.0.0", "a..b", "evil.example", "127.0.0.1#x"),
    "for": ("24GB", "H100", "80", "0GB", "-1GB", "1e400GB", "nanGB", "GB", "none"),
    "set": ("sft.seed=1", "sft.seed=", "sft.seed=[1]", "dpo.seed=1", "sft.lora_dim=!!int ''"),
    "from": ("sft", "reward", "nothing"),
    "enable_lora": ("q", "k", "v"),
    "stop_tokens": ("2", "<|endoftext|>"),
}
# What stands at the end of a line, beside options of the table.
EXTRA = (
    *(("--",), ("--help",), ("-h",), ("stray",), ("-x",), ("",), ("\0",), ("\udcff",)),
    *(("--config", name) for name in ("options.yaml", "missing", "\0", "", "directory", "~nobody")),
    *(("--nothing",), ("--nothing=1",), ("--local_rank=0",), ("--=",), ("--\udcff", "1")),
    *(("--num_gpus", "0"), ("--master_port", "x"), ("--hostfile", "\0"), ("--", "--seed", "1")),
    *(("--see", "1"), ("--lora-dim", "4"), ("--LORA_DIM", "4"), ("--lora_dim=4=5",)),
    *(("-m",), ("-m", ","), ("-m", "bleu,x"), ("-R",), ("-H", "file.txt"), ("-nr", "x"), ("-p",)),
)
HOSTILE_YAML = (
    *("", "- 1\n", "a\n", "{\n", "? [a]: b\n", "seed: 1\nseed: 2\n", "1: 2\n", "on: off\n"),
    *("null: 1\n", "seed: [1]\n", "seed: {a: 1}\n", "seed: 2001-99-99\n", "seed: !!int ''\n"),
    *("dry_run: !!bool x\n", "output_dir: !!timestamp x\n", "output_dir: !!binary eA==\n"),
    *("seed: !!float x\n", "output_dir: 2024-01-02\n", "output_dir: 12:30\n", "output_dir: 010\n"),
    *("data_path: &a [*a]\n", "seed: .nan\n", "max_grad_norm: .inf\n", "output_dir: 1.50\n"),
    *('output_dir: "a\\0b"\n', "seed: !!python/object:os.system x\n", "\x00", "\ufeffseed: 1\n"),
    *('output_dir: "\\ud83d"\n', "data_path: [null]\n", "data_path: [[a]]\n", "seed: true\n"),
    *("<<: 1\n", "<<: {seed: 1}\n", "seed: 1\n---\nseed: 2\n", "&a seed: *a\n", "stages: 1\n"),
    *("stages: {sft: {seed: x}}\noutput_dir: o\n", "stages: {sft: null}\noutput_dir: o\n"),
    *("stages: {1: 2}\noutput_dir: o\n", "stages: {sft: {1: 2}}\noutput_dir: o\n"),
    *("stages: {sft: {}}\noutput_dir: 3\n", "stages: {sft: {}}\ncommon: {null: 1}\n"),
    *("stages: {sft: {}}\nlauncher: {num_gpus: 0}\noutput_dir: o\n", "[" * 5000),
    *('stages: {sft: {}}\noutput_dir: "a\\0"\n', "seed: " + "9" * 5000 + "\n", "\t\n"),
    *("stages: {sft: {}}\nstages: {dpo: {}}\noutput_dir: o\n", "? {a: b}\n: 1\n", "dtype: 1\n"),
)
HOSTILE_DEEPSPEED = (
    *("", "[]", "{", "1", "null", "\0", "[" * 5000, '{"train_batch_size": true}', '{"a": 1}'),
    *('{"gradient_clipping": NaN}', '{"gradient_clipping": 1e999}', '{"gradient_clipping": -1}'),
    *('{"train_micro_batch_size_per_gpu": -3}', '{"gradient_accumulation_steps": 0}'),
    *('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', '{"bf16": null}'),
    *('{"train_batch_size": 7, "train_batch_size": 8}', '{"optimizer": {"params": null}}'),
    *('{"train_batch_size": ' + "9" * digits + "}" for digits in (400, 5000)),
    '{"gradient_clipping": ' + "9" * 400 + "}",
)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), st.dates()),
    *(st.text(max_size=5), st.sampled_from(HOSTILE)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=5,
)


def texts_for(name):
    """Texts that fit an option's name."""
    return [each for part, texts in MEANT.items() if part in name for each in texts] or TEXTS


def words_of(option, *, fits=False):
    """A word for the value of an option, one that fits or any."""
    fitting = [str(each) for each in option.choices] or FITTING.get(option.kind)
    fitting = st.sampled_from(fitting or texts_for(option.name))
    drawn = {
        int: st.integers(-(2**65), 2**65).map(str),
        float: st.floats().map(repr),
        bool: st.nothing(),
        str: st.text(max_size=8),
    }[option.kind]
    return fitting if fits else st.one_of(st.sampled_from(HOSTILE), drawn)


@st.composite
def typed_options(draw, option, *, fits=False):
    """An option as a person may type it."""
    name = draw(st.sampled_from(option.names))
    if option.kind is bool and not option.choices:
        on = not option.has_no or draw(st.booleans())
        return Typed(option, (f"--{name}" if on else f"--no-{name}",), on)
    words = draw(st.lists(words_of(option, fits=fits), min_size=not option.many, max_size=3))
    words = tuple(words if option.many else words[:1])
    values = [option.value(word) for word in words]
    value = REFUSED if REFUSED in values else tuple(values) if option.many else values[0]
    is_like_an_option = any(word.startswith("-") for word in words)
    if len(words) == 1 and (is_like_an_option or draw(st.integers(0, 3)) == 0):
        return Typed(option, (f"--{name}={words[0]}",), REFUSED if words == ("--",) else value)
    return Typed(option, (f"--{name}", *words), REFUSED if is_like_an_option else value)


@st.composite
def lines(draw, commands=COMMANDS):
    """A command line of a verb, at most one of whose values is hostile, or a file that it names."""
    command = draw(st.sampled_from(commands))
    table = option_table(command)
    picked = st.lists(st.sampled_from(table), max_size=4, unique_by=lambda each: each.name)
    chosen = draw(picked) if table else []
    hostile = draw(st.integers(0, len(chosen)))
    typed = [draw(typed_options(o, fits=n != hostile)) for n, o in enumerate(chosen)]
    extra, files = (), ()
    turn = draw(st.integers(0, 3))
    if turn == 0 and command.config is None:
        files = (("drawn", draw(yaml_texts(command))),)
    elif turn == 0:
        name = "deepspeed" if command.verb == "glue" else "deepspeed_config"
        typed = [each for each in typed if each.option.name != name]
        has_deepspeed = any(each.name == name for each in table) and draw(st.booleans())
        content = draw(deepspeed_texts() if has_deepspeed else yaml_texts(command))
        files = (("drawn", content),)
        extra = (f"--{name if has_deepspeed else 'config'}", "drawn")
    elif turn == 1:
        extra = draw(st.sampled_from(EXTRA))
    return Line(command, tuple(typed), extra, files)


@st.composite
def yaml_texts(draw, command):
    """A file of options whose values are of any kind, a pipeline's, or a hostile text."""
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(HOSTILE_YAML))
    stage = draw(st.sampled_from(list(STAGES)))
    is_recipe = command.config is None or draw(st.integers(0, 3)) == 0
    table = option_table(Command((stage,), STAGES[stage].config) if is_recipe else command)
    content = {}
    for option in draw(st.lists(st.sampled_from(table), min_size=1, max_size=3)):
        word = draw(words_of(option)) if option.kind is not bool or option.choices else "true"
        content[option.name] = draw(st.one_of(st.just(word), SCALARS, VALUES))
    if is_recipe:
        content = {"output_dir": "o", "stages": {stage: content}}
        if draw(st.integers(0, 3)) == 0:
            part = draw(st.sampled_from(("common", "launcher", "stages", "output_dir", "x")))
            content[part] = draw(VALUES)
    with contextlib.suppress(ValueError, yaml.YAMLError):  # what YAML cannot hold
        return yaml.safe_dump(content, allow_unicode=draw(st.booleans()))
    return draw(st.sampled_from(HOSTILE_YAML))


@st.composite
def deepspeed_texts(draw):
    """A DeepSpeed JSON whose values are of any kind."""
    if draw(st.integers(0, 2)) == 0:
        return draw(st.sampled_from(HOSTILE_DEEPSPEED))
    names = (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("gradient_clipping", "zero_optimization", "bf16", "fp16", "optimizer", "scheduler"),
        *("tensorboard", "tensor_parallel", "autotp_size", "zero_optimisation", ""),
    )
    inner = (
        *("stage", "enabled", "offload_optimizer", "offload_param", "device", "type", "params"),
        *("lr", "zero_hpz_partition_size", "zero_quantized_gradients", "x", "loss_scale"),
    )
    leaf = st.one_of(
        SCALARS.filter(lambda value: not hasattr(value, "year")),
        st.sampled_from(("auto", "cpu", "nvme", "none", 0, 1, 2, 3, True, False)),
    )
    value = st.recursive(
        leaf,
        lambda value: st.one_of(
            st.lists(value, max_size=2), st.dictionaries(st.sampled_from(inner), value, max_size=3)
        ),
        max_leaves=6,
    )
    return json.dumps(draw(st.dictionaries(st.sampled_from(names), value, min_size=1, max_size=3)))
