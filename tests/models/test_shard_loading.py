"""Weights read part by part: the parts are those of the whole, from files of every form."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dschat_lora.config.groups import ModelConfig
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.parallel import shard_of
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.models.reward_model import load_reward_model
from dschat_lora.models.tensor_parallel import divide
from helpers.tiny import KINDS, tiny_config

OPTIONS = ModelConfig()


def part(path, rank, size=2, *, dtype=torch.float32, load=load_causal_lm, **more):
    """What a rank reads; no process group is needed for that."""
    group = TensorGroup(None, rank, size)
    config = load_config(path, OPTIONS)
    return load(path, config, OPTIONS, dtype=dtype, meta=False, group=group, **more)


def assert_whole(parts, whole):
    """What the ranks hold is the whole model, put together by hand."""
    for name, expected in whole.named_parameters(remove_duplicate=False):
        assert torch.equal(_join([each.get_parameter(name) for each in parts]), expected), name


def _join(pieces):
    shard = shard_of(pieces[0])
    if shard is None:
        for piece in pieces[1:]:
            assert torch.equal(piece, pieces[0])
        return pieces[0]
    whole = torch.full(full_shape(pieces[0]), float("nan"), dtype=pieces[0].dtype)
    for rank, piece in enumerate(pieces):
        begin = 0
        for start, stop in shard.ranges(rank):
            size = stop - start
            target = whole.narrow(shard.dim, start, size)
            assert target.isnan().all()  # nobody else holds it
            target.copy_(piece.detach().narrow(shard.dim, begin, size))
            begin += size
        assert begin == piece.shape[shard.dim]
    return whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_together_are_the_whole_model(model_directory, kind, size):
    path = model_directory(kind)
    if kind in ("llama", "qwen2") and size == 4:
        with pytest.raises(ValueError, match="--tensor_parallel_size 4 .* 2 key and value heads"):
            part(path, 0, size)
        return
    parts = [part(path, rank, size) for rank in range(size)]
    assert_whole(parts, AutoModelForCausalLM.from_pretrained(path))
    heads = [each.get_output_embeddings().weight for each in parts]
    tied = [each.get_input_embeddings().weight is h for each, h in zip(parts, heads, strict=True)]
    assert tied == [AutoConfig.from_pretrained(path).tie_word_embeddings] * size


def test_every_weight_of_a_block_but_norms_and_row_biases_is_divided(model_directory):
    model = part(model_directory("opt"), 1)
    whole = [name for name, p in model.named_parameters() if shard_of(p) is None]
    kept = ("norm", "embed_positions", "out_proj.bias", "fc2.bias")
    assert [name for name in whole if not any(word in name for word in kept)] == []


def test_buffers_are_real_and_the_mode_is_that_of_a_loaded_model(model_directory):
    path = model_directory("llama")
    model, whole = part(path, 0), AutoModelForCausalLM.from_pretrained(path)
    assert not model.training
    assert model.generation_config.eos_token_id == whole.generation_config.eos_token_id
    expected = dict(whole.named_buffers())
    assert expected
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name])


def test_files_may_be_several_and_of_another_type(model_directory, tmp_path):
    path = model_directory("gpt2")
    whole = AutoModelForCausalLM.from_pretrained(path)
    whole = whole.bfloat16()
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert_whole([part(str(tmp_path), rank) for rank in range(2)], whole.float())
    narrow = part(str(tmp_path), 0, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}


RENAMED = {
    "gpt2 without the head's prefix": ("gpt2", "transformer.", ""),
    "opt without the head's prefix": ("opt", "model.decoder.", "decoder."),
    "neox before its head was renamed": ("neox", "lm_head.", "embed_out."),
}


@pytest.mark.parametrize(("kind", "now", "then"), RENAMED.values(), ids=RENAMED)
def test_names_of_older_files_are_understood(model_directory, tmp_path, kind, now, then):
    path = model_directory(kind)
    whole = AutoModelForCausalLM.from_pretrained(path)
    whole.config.save_pretrained(tmp_path)
    stored = load_file(f"{path}/model.safetensors")
    renamed = {
        then + name.removeprefix(now) if name.startswith(now) else name: tensor
        for name, tensor in stored.items()
    }
    # transformers may have written the older names by itself.
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_whole([part(str(tmp_path), rank) for rank in range(2)], whole)


@pytest.mark.parametrize(
    ("rank", "name", "size", "message"),
    [
        (0, "1.mlp.down_proj", None, "lack model.layers.1.mlp.down_proj.weight"),
        (1, "0.self_attn.o_proj", 30, r"o_proj.weight has the shape \(32, 30\), the model"),
    ],
    ids=["missing", "of another shape"],
)
def test_weights_that_do_not_fit_are_named(model_directory, tmp_path, rank, name, size, message):
    path = model_directory("llama")
    stored = load_file(f"{path}/model.safetensors")
    weight = stored.pop(f"model.layers.{name}.weight")
    if size is not None:
        stored[f"model.layers.{name}.weight"] = weight[:, :size].contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_config(path, OPTIONS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        part(str(tmp_path), rank)


def test_more_ranks_than_words_to_divide_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("gpt2", vocab_size=5))
    with pytest.raises(ValueError, match="size 4 leaves a process without any of the 5 tokens"):
        divide(model, TensorGroup(None, 0, 4))


def test_files_that_cannot_be_read_in_parts_are_refused(model_directory, tmp_path):
    load_config(model_directory("opt"), OPTIONS).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    with pytest.raises(ValueError, match="reads weights in parts, which takes safetensors"):
        part(str(tmp_path), 0)


def test_reward_model_of_a_language_model_has_one_new_head_on_all_ranks(model_directory):
    path = model_directory("opt")
    parts = [part(path, rank, load=load_reward_model, seed=5) for rank in range(2)]
    whole = load_reward_model(
        path, load_config(path, OPTIONS), OPTIONS, dtype=torch.float32, seed=5, meta=False
    )
    assert_whole(parts, whole)
    assert shard_of(parts[0].score.weight) is None


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
def test_plans_of_transformers_divide_every_linear_layer_of_the_blocks(kind):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            tiny_config(kind, num_attention_heads=4, num_key_value_heads=2)
        )
    divide(model, TensorGroup(None, 0, 2))
    left = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert left == []
