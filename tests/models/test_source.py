"""What a model's name stands for: bundled, hub, directory, adapter, an earlier stage's output."""

from pathlib import Path

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.models.source import ModelSource, find_model
from helpers.step1 import write_adapter_config


def model_at(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_no_name_is_the_bundled_model():
    source = find_model(None)
    assert source.bundled
    assert (Path(source.base), source.adapter) == (BUNDLED_MODEL.resolve(), None)


@pytest.mark.parametrize("name", ["gpt2", "facebook/opt-1.3b", "meta-llama/Llama-2-7b-hf"])
def test_hub_name_is_passed_on(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = find_model(name)
    assert (source.base, source.adapter, source.bundled) == (name, None, False)


@pytest.mark.parametrize("name", ["facebook/opt-1.3b", "./base", "~/base"])
def test_model_directory_is_made_absolute_and_goes_before_a_hub_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = model_at(tmp_path / name.removeprefix("~/"))
    assert find_model(name).base == str(model.resolve())


def test_adapter_brings_its_base(tmp_path):
    directory = write_adapter_config(tmp_path / "adapter", r=8)
    source = find_model(str(directory))
    assert (source.base, source.adapter) == (str(BUNDLED_MODEL.resolve()), directory.resolve())
    assert source.adapter_config.r == 8
    assert source.bundled


def test_output_directory_stands_for_its_model_and_before_that_for_its_adapter(tmp_path):
    out = str(tmp_path / "out")
    model = model_at(tmp_path / "out" / "model")
    source = find_model(out)
    assert (source.base, source.adapter) == (str(model.resolve()), None)
    adapter = write_adapter_config(tmp_path / "out" / "adapter")
    assert find_model(out) == find_model(str(adapter))


def test_adapter_on_a_hub_base_names_it(tmp_path):
    write_adapter_config(tmp_path, base_model_name_or_path="facebook/opt-1.3b")
    assert find_model(str(tmp_path)).base == "facebook/opt-1.3b"


def test_adapter_without_weights_is_refused_at_once(tmp_path):
    directory = write_adapter_config(tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors"):
        find_model(str(directory))


def test_empty_name_is_not_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(model_at(tmp_path / "here"))
    with pytest.raises(ValueError, match="--model_name_or_path is empty"):
        find_model("")


def test_tokenizer_comes_from_the_adapter_if_one_was_saved_there(tmp_path):
    source = ModelSource("base", tmp_path)
    assert source.tokenizer == "base"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert source.tokenizer == str(tmp_path)
    assert ModelSource("base").tokenizer == "base"
