"""What a model's name stands for: bundled, hub, directory, adapter, an earlier stage's output."""

from pathlib import Path

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.models.source import find_model
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


def test_directory_goes_before_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_at(tmp_path / "facebook" / "opt-1.3b")
    assert find_model("facebook/opt-1.3b").base == str(tmp_path / "facebook" / "opt-1.3b")


def test_model_directory_is_made_absolute(tmp_path, monkeypatch):
    model_at(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert find_model("./base").base == str((tmp_path / "base").resolve())


def test_adapter_brings_its_base(tmp_path):
    directory = write_adapter_config(tmp_path / "adapter", r=8)
    source = find_model(str(directory))
    assert (source.base, source.adapter) == (str(BUNDLED_MODEL.resolve()), directory.resolve())
    assert source.adapter_config.r == 8
    assert source.bundled


def test_output_directory_stands_for_its_adapter(tmp_path):
    directory = write_adapter_config(tmp_path / "out" / "adapter")
    assert find_model(str(tmp_path / "out")) == find_model(str(directory))


def test_output_directory_without_adapter_stands_for_its_model(tmp_path):
    model = model_at(tmp_path / "out" / "model")
    source = find_model(str(tmp_path / "out"))
    assert (source.base, source.adapter) == (str(model.resolve()), None)


def test_adapter_goes_before_a_merged_model(tmp_path):
    model_at(tmp_path / "out" / "model")
    write_adapter_config(tmp_path / "out" / "adapter")
    assert find_model(str(tmp_path / "out")).adapter is not None


def test_adapter_on_a_hub_base_names_it(tmp_path):
    write_adapter_config(tmp_path, base_model_name_or_path="facebook/opt-1.3b")
    assert find_model(str(tmp_path)).base == "facebook/opt-1.3b"


def test_home_directory_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = model_at(tmp_path / "base")
    assert find_model("~/base").base == str(model.resolve())


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "../model", "a/b/c", "output/sft"])
def test_path_to_nothing_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--model_name_or_path {name} does not exist; give a hub"):
        find_model(name)


def test_name_beside_local_directories_is_taken_for_a_path(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--model_name_or_path runs/sft does not exist"):
        find_model("runs/sft")


def test_file_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ValueError, match=r"--model_name_or_path .*model.bin is a file"):
        find_model(str(tmp_path / "model.bin"))


def test_directory_of_something_else_is_refused_with_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds neither config.json nor .*it holds notes.txt"):
        find_model(str(tmp_path))


def test_empty_name_is_not_the_current_directory(tmp_path, monkeypatch):
    model_at(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="--model_name_or_path"):
        find_model("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        (
            {"base_model_name_or_path": "/nowhere/base"},
            "base of the adapter .* is missing.*nowhere",
        ),
        ({"base_model_name_or_path": "./base"}, "base of the adapter .* is missing.*./base"),
        ({"base_model_name_or_path": "~nobody_here/x"}, "base of the adapter .* missing.*~nobody"),
        ({"r": 0}, "r and lora_alpha must be > 0"),
        ({"r": "4"}, "r must be int"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ],
)
def test_adapter_that_cannot_be_continued_is_refused(tmp_path, changes, message):
    write_adapter_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        find_model(str(tmp_path))


def test_base_directory_without_a_model_is_refused(tmp_path):
    (tmp_path / "base").mkdir()
    write_adapter_config(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(ValueError, match="the base .* holds no config.json"):
        find_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"'])
def test_damaged_adapter_config_is_named(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ValueError, match="adapter_config.json"):
        find_model(str(tmp_path))


def test_adapter_without_weights_is_refused_at_once(tmp_path):
    directory = write_adapter_config(tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors"):
        find_model(str(directory))


def test_tokenizer_comes_from_the_adapter_if_one_was_saved_there(tmp_path):
    from dschat_lora.models.source import ModelSource

    source = ModelSource("base", tmp_path)
    assert source.tokenizer == "base"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert source.tokenizer == str(tmp_path)
    assert ModelSource("base").tokenizer == "base"
