from types import SimpleNamespace

import pytest
from torch import nn
from toy import toy_model

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.targets import (
    choose_saved,
    choose_targets,
    minimal_endings,
    minimal_saved_endings,
)

IN_BLOCKS = ["blocks.0.q_proj", "blocks.0.c_proj", "blocks.1.q_proj", "blocks.1.c_proj"]


def chosen(*targets, **options):
    if targets:
        options["target_modules"] = targets
    return choose_targets(toy_model(), LoraConfig(lora_dim=2, **options))


@pytest.mark.parametrize(
    ("targets", "options", "expected"),
    [
        ((), {}, IN_BLOCKS),
        (("q_proj",), {}, ["blocks.0.q_proj", "blocks.1.q_proj"]),
        (("1.q_proj",), {}, ["blocks.1.q_proj"]),
        (("blocks.0.c_proj", "project"), {}, ["project", "blocks.0.c_proj"]),
        (("embed", "head"), {}, ["embed", "head"]),
        ((r"blocks\.\d+\.q_.*",), {}, ["blocks.0.q_proj", "blocks.1.q_proj"]),
        ((r".*\.(q|c)_proj",), {}, IN_BLOCKS),
        # DeepSpeed-Chat's is a part of a name.
        ((), {"lora_module_name": "blocks.1."}, IN_BLOCKS[2:]),
        ((), {"lora_module_name": "pro"}, ["project", *IN_BLOCKS]),
        ((), {"modules_to_save": ("blocks.0",)}, IN_BLOCKS[2:]),
    ],
)
def test_names_match_whole_parts_from_the_end_and_patterns_the_whole_name(
    targets, options, expected
):
    assert chosen(*targets, **options) == expected


REFUSED = {
    "part of a name": (("_proj",), {}, "'_proj' matches no layer"),
    "a pattern without the start": (("(q_proj)",), {}, "matches no layer"),
    "a pattern without the end": (("blocks.[01]",), {}, "matches no layer"),
    "an embedding by a module's name": (
        *((), {"lora_module_name": "embed"}, "--lora_module_name 'embed' matches no layer"),
    ),
    "a module's name and targets": (
        *(("head",), {"lora_module_name": "q"}),
        r"--lora_module_name 'q' and --target_modules 'head' both .* give one",
    ),
    "a likely guess": (
        *(("c_proj", "q_porj"), {}),
        r"^--target_modules 'q_porj' matches no layer; did you mean 'q_proj'\? "
        "The model has: c_proj, embed, head, project, q_proj$",
    ),
    "no likely guess": (("zzz",), {}, r"'zzz' matches no layer\. The model has: c_proj, "),
    "norms": (("norm",), {}, "'norm' matches no layer"),
    "a rule beside a name": (
        *(("head", "all-linear"), {}, "'all-linear' must be the only value, got 2 values"),
    ),
    "a pattern beside a name": (
        *(("head", "q_.*"), {}, r"'q_\.\*' must be the only value, got 2 values"),
    ),
    "a broken pattern": (("(",), {}, r"--target_modules '\(' is not a regular expression"),
}


@pytest.mark.parametrize(("targets", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_names_no_layer_is_refused_with_what_there_is(targets, options, message):
    with pytest.raises(ValueError, match=message):
        chosen(*targets, **options)


def test_what_is_no_layer_of_a_block_or_has_its_own_forward_is_no_candidate():
    class Offset(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 2)

    model = toy_model()
    model.embed = Offset(9, 6)
    with pytest.raises(ValueError, match="'embed' matches no layer"):
        choose_targets(model, LoraConfig(lora_dim=2, target_modules=("embed",)))
    with pytest.raises(ValueError, match="'all-linear' matches no layer"):
        choose_targets(nn.Sequential(nn.Linear(2, 2)), LoraConfig(lora_dim=2))


def test_saved_modules_are_found_by_ending_outermost_only():
    model = toy_model()
    assert choose_saved(model, ["q_proj"]) == ["blocks.0.q_proj", "blocks.1.q_proj"]
    assert choose_saved(model, ["blocks.0", "0.q_proj"]) == ["blocks.0"]
    words = r"--modules_to_save 'haed' matches no layer; did you mean 'head'"
    for name, message in (("haed", words), ("blocks", "'blocks' is a list of modules")):
        with pytest.raises(ValueError, match=message):
            choose_saved(model, [name])


PATHS = ["a.norm", "a.q", "b.q", "b.k", "score", "old_score", "x.a.q"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.q", "b.q", "x.a.q"], ["q"]),
        (["b.q"], ["b.q"]),
        (["b.q", "b.k"], ["b.q", "k"]),
        (["x.a.q"], ["x.a.q"]),
        (["a.q", "b.k"], r"a\.q|b\.k"),
    ],
)
def test_minimal_endings_hit_the_names_and_nothing_else(names, expected):
    assert minimal_endings(names, PATHS) == expected


def test_saved_endings_allow_for_matching_inside_a_part():
    assert minimal_saved_endings(["old_score"], PATHS) == ["old_score"]
    with pytest.raises(ValueError, match="PEFT would save other modules too"):
        minimal_saved_endings(["score"], PATHS)


# Those that PEFT refuses, and those whose kernel on a GPU takes the weight alone as well.
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
MAMBA += ("bamba", "granitemoehybrid", "zamba2")


def names_of_type(kind, **options):
    """What is adapted in a block with the layers of a recurrent one."""
    model = nn.Module()
    block = nn.ModuleDict({"in_proj": nn.Linear(2, 2), "out_proj": nn.Linear(2, 2)})
    model.layers, model.config = nn.ModuleList([block]), SimpleNamespace(model_type=kind)
    return choose_targets(model, LoraConfig(lora_dim=2, **options))


def test_what_the_kernel_of_mamba_blocks_passes_by_is_left_out_and_refused_by_name():
    for kind in MAMBA:
        assert names_of_type(kind) == ["layers.0.in_proj"]
    assert names_of_type("qwen3_next") == ["layers.0.in_proj", "layers.0.out_proj"]
    words = r"'out_proj', whose adapter the GPU kernel of Mamba blocks \(mamba2\) would bypass"
    for options in ({"target_modules": ("in_proj", "out_proj")}, {"lora_module_name": "proj"}):
        with pytest.raises(ValueError, match=words):
            names_of_type("mamba2", **options)
