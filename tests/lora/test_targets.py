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


def test_default_is_every_linear_layer_of_the_blocks_and_no_other():
    assert chosen() == IN_BLOCKS


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj",), ["blocks.0.q_proj", "blocks.1.q_proj"]),
        (("1.q_proj",), ["blocks.1.q_proj"]),
        (("blocks.0.c_proj", "project"), ["project", "blocks.0.c_proj"]),
        (("embed", "head"), ["embed", "head"]),
        ((r"blocks\.\d+\.q_.*",), ["blocks.0.q_proj", "blocks.1.q_proj"]),
        ((r".*\.(q|c)_proj",), IN_BLOCKS),
    ],
)
def test_names_match_whole_parts_from_the_end_and_patterns_the_whole_name(targets, expected):
    assert chosen(*targets) == expected


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
        *(("head", "all-linear"), {}, "'all-linear' must stand alone, got 2 values"),
    ),
    "a pattern beside a name": (
        *(("head", "q_.*"), {}, r"'q_\.\*' must stand alone, got 2 values"),
    ),
    "a broken pattern": (("(",), {}, r"--target_modules '\(' is no regular expression"),
}


@pytest.mark.parametrize(("targets", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_names_no_layer_is_refused_with_what_there_is(targets, options, message):
    with pytest.raises(ValueError, match=message):
        chosen(*targets, **options)


def test_module_name_of_deepspeed_chat_is_a_substring():
    assert chosen(lora_module_name="blocks.1.") == ["blocks.1.q_proj", "blocks.1.c_proj"]
    assert chosen(lora_module_name="pro") == ["project", *IN_BLOCKS]


def test_all_linear_without_blocks_is_refused():
    with pytest.raises(ValueError, match="'all-linear' matches no layer"):
        choose_targets(nn.Sequential(nn.Linear(2, 2)), LoraConfig(lora_dim=2))


def test_embedding_with_its_own_forward_is_no_candidate():
    class Offset(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 2)

    model = toy_model()
    model.embed = Offset(9, 6)
    with pytest.raises(ValueError, match="'embed' matches no layer"):
        choose_targets(model, LoraConfig(lora_dim=2, target_modules=("embed",)))


def test_modules_trained_in_full_get_no_factors():
    assert chosen(modules_to_save=("blocks.0",)) == ["blocks.1.q_proj", "blocks.1.c_proj"]


def test_saved_modules_are_found_by_ending_outermost_only():
    model = toy_model()
    assert choose_saved(model, ["q_proj"]) == ["blocks.0.q_proj", "blocks.1.q_proj"]
    assert choose_saved(model, ["blocks.0", "0.q_proj"]) == ["blocks.0"]


def test_saved_module_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match=r"--modules_to_save 'haed' matches no layer; did you mean 'head'"
    ):
        choose_saved(toy_model(), ["haed"])


def test_saved_list_of_modules_is_refused():
    with pytest.raises(ValueError, match="'blocks' is a list of modules"):
        choose_saved(toy_model(), ["blocks"])


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
    with pytest.raises(ValueError, match="PEFT would save further modules too"):
        minimal_saved_endings(["score"], PATHS)


# Those that PEFT refuses, and those whose kernel on a GPU takes the weight alone as well.
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
MAMBA += ("bamba", "granitemoehybrid", "zamba2")


def of_type(kind):
    """A block with the layers of a recurrent one."""
    model = nn.Module()
    block = nn.ModuleDict({"in_proj": nn.Linear(2, 2), "out_proj": nn.Linear(2, 2)})
    model.layers, model.config = nn.ModuleList([block]), SimpleNamespace(model_type=kind)
    return model


@pytest.mark.parametrize("kind", MAMBA)
def test_all_linear_leaves_out_what_the_kernel_of_mamba_blocks_passes_by(kind):
    assert choose_targets(of_type(kind), LoraConfig(lora_dim=2)) == ["layers.0.in_proj"]


@pytest.mark.parametrize(
    "options", [{"target_modules": ("in_proj", "out_proj")}, {"lora_module_name": "proj"}]
)
def test_what_the_kernel_of_mamba_blocks_passes_by_is_refused_by_name(options):
    words = r"'out_proj', whose adapter the GPU kernel of Mamba blocks \(mamba2\) would pass by"
    with pytest.raises(ValueError, match=words):
        choose_targets(of_type("mamba2"), LoraConfig(lora_dim=2, **options))


def test_out_proj_of_other_types_is_adapted():
    names = choose_targets(of_type("qwen3_next"), LoraConfig(lora_dim=2))
    assert names == ["layers.0.in_proj", "layers.0.out_proj"]
