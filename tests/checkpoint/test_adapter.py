import json
import os
import re
import shlex
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from dschat_lora.checkpoint import tensors as tensors_module
from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of, read_adapter, write_adapter
from dschat_lora.checkpoint.adapter_config import accept_adapter, verify_adapter
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora
from helpers.addons import with_addon

ROOT = Path(__file__).resolve().parents[2]
CONFIG = LoraConfig(lora_dim=2, lora_alpha=4, lora_dropout=0.1)


def small_model(config=CONFIG):
    torch.manual_seed(0)
    block = nn.ModuleDict({"q": nn.Linear(4, 6), "v": nn.Linear(4, 5)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block]), "score": nn.Linear(5, 1)})
    apply_lora(model, config, seed=0)
    return model


def write(directory, model=None, config=CONFIG, *, changed=(), **options):
    """Write the model's adapter, but for what is changed; what was written."""
    model = small_model(config) if model is None else model
    tensors = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    tensors |= dict(changed)
    settings = {"layout": adapter_layout(model), "base_model_name_or_path": "some/base"}
    write_adapter(directory, tensors, config, **settings | options)
    return tensors


def filled_model():
    model = small_model()
    model.blocks[0].q.lora_B.data.fill_(3.0)
    return model


def rewrite(directory, change):
    """Apply ``change`` to the stored tensors, as a faulty writer would."""
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    write_manifest(directory, kind="adapter")


def rewrite_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    write_manifest(directory, kind="adapter")


def card(staging):
    (staging / "README.md").write_text("card")


def refused(directory, message, read=read_adapter):
    with pytest.raises(ValueError, match=message):
        read(directory)


@pytest.fixture
def adapter(tmp_path):
    """The directory of an adapter."""
    write(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def foreign(adapter):
    """That of one as stock PEFT leaves it, without a manifest."""
    rewrite(adapter, lambda tensors: None)
    (adapter / "manifest.json").unlink()
    return adapter


A = "base_model.model.blocks.0.q.lora_A.weight"
B = "base_model.model.blocks.0.q.lora_B.weight"


def test_layout_on_disk(tmp_path):
    """Float32 whatever the type of the tensors, in the same bytes by every process."""
    config = LoraConfig(lora_dim=2, modules_to_save=("score",), train_bias="lora_only")
    model, adapter = small_model(config), tmp_path / "adapter"
    halves = {name: p.detach().bfloat16() for name, p in adapter_parameters(model).items()}
    write(adapter, model, config, changed=halves, write_more=card)
    weights = adapter / "adapter_model.safetensors"
    stored = load_file(weights)
    shapes = {
        A: (2, 4),
        B: (6, 2),
        "base_model.model.blocks.0.q.base_layer.bias": (6,),
        "base_model.model.blocks.0.v.lora_A.weight": (2, 4),
        "base_model.model.blocks.0.v.lora_B.weight": (5, 2),
        "base_model.model.blocks.0.v.base_layer.bias": (5,),
        "base_model.model.score.weight": (1, 5),
        "base_model.model.score.bias": (1,),
    }
    assert {name: tuple(t.shape) for name, t in stored.items()} == shapes
    assert {t.dtype for t in stored.values()} == {torch.float32}
    fields = json.loads((adapter / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/base",
        "r": 2,
        "lora_alpha": 32,
        "target_modules": ["q", "v"],
        "modules_to_save": ["score"],
        "bias": "lora_only",
        "use_rslora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    assert {name: fields[name] for name in expected} == expected
    content = json.loads((adapter / "manifest.json").read_text())
    assert content["kind"] == "adapter"
    names = {path.name for path in adapter.iterdir()}
    assert content["files"].keys() == names - {"manifest.json"}
    assert "README.md" in names
    tensors = content["files"]["adapter_model.safetensors"]["tensors"]
    assert {n: tuple(t["shape"]) for n, t in tensors.items()} == shapes
    assert {t["dtype"] for t in tensors.values()} == {"F32"}
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "plain", *adapter.iterdir())}
    assert len(modes) == 1  # other users may read what was written


def test_reading_returns_what_was_written(tmp_path):
    adapter = tmp_path / "adapter"
    tensors = write(adapter, write_more=card)
    # Those of other versions that are unset or tune.
    rewrite_config(adapter, future_config=None, future_size=16, future_flag=False)
    for change in (lambda p: p.write_text("another"), lambda p: p.unlink()):
        change(adapter / "README.md")
        (adapter / "notes.txt").write_text("more")
        verify_adapter(adapter)
        back = read_adapter(adapter)
    assert back.tensors.keys() == tensors.keys()
    assert all(torch.equal(back.tensors[name], t) for name, t in tensors.items())
    assert (back.config.base_model_name_or_path, back.config.r) == ("some/base", 2)
    assert back.base_tensors == {}
    config = replace(CONFIG, target_modules=("blocks.0.q", "blocks.0.v"))
    assert lora_config_of(adapter) == config
    assert len(load_adapter(small_model().to("meta"), adapter)) == 4


def test_second_write_replaces_the_first_whole(tmp_path):
    write(tmp_path / "adapter", write_more=lambda at: (at / "stale").write_text(""))
    write(tmp_path / "adapter", filled_model())
    assert (read_adapter(tmp_path / "adapter").tensors["blocks.0.q.lora_B"] == 3).all()
    assert not (tmp_path / "adapter" / "stale").exists()
    assert os.listdir(tmp_path) == ["adapter"]


def disk_full(*_, **__):
    raise OSError("disk full")


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("stage", ["tensors", "further files", "rename"])
def test_interrupted_write_leaves_what_was_there(stage, exists, tmp_path, monkeypatch):
    first = write(tmp_path / "adapter") if exists else {}
    options, rename = {}, os.rename

    def no_final_rename(source, target):
        return (disk_full if str(source).endswith(".tmp") else rename)(source, target)

    if stage == "tensors":
        monkeypatch.setattr(tensors_module, "save", disk_full)
    elif stage == "further files":
        options["write_more"] = disk_full
    else:
        monkeypatch.setattr(os, "rename", no_final_rename)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "adapter", filled_model(), **options)
    assert os.listdir(tmp_path) == (["adapter"] if exists else [])
    back = read_adapter(tmp_path / "adapter").tensors if exists else {}
    assert all(torch.equal(back[name], t) for name, t in first.items())


@pytest.mark.parametrize("exists", [False, True])
def test_killed_write_leaves_what_was_there_and_the_next_clears_up(exists, tmp_path):
    final, model = tmp_path / "adapter", filled_model()
    if exists:
        write(final)
    child = os.fork()
    if child == 0:
        write(final, model, write_more=lambda _: os._exit(9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert final.exists() == exists
    if exists:
        assert not read_adapter(final).tensors["blocks.0.q.lora_B"].any()
    write(final, model)
    assert (read_adapter(final).tensors["blocks.0.q.lora_B"] == 3).all()
    assert os.listdir(tmp_path) == ["adapter"]


def test_final_name_never_shows_a_partial_adapter(tmp_path):
    final, seen, done = tmp_path / "adapter", [], threading.Event()

    def watch():
        while not done.is_set():
            if final.exists():
                seen.append(sorted(os.listdir(final)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    write(final, write_more=card)
    done.set()
    watcher.join()
    whole = ["README.md", "adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert all(listing == whole for listing in seen)


def test_file_that_reads_back_differently_does_not_take_the_final_name(tmp_path, monkeypatch):
    def corrupt(tensors):
        return save({n: t + (t == t.max()) for n, t in tensors.items()})

    monkeypatch.setattr(tensors_module, "save", corrupt)
    with pytest.raises(OSError, match="differs from the one written"):
        write(tmp_path / "adapter")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("blocks.0.q.lora_A", torch.zeros(8), r"lora_A must be \(2, n\) for rank 2, got \(8,\)"),
        ("blocks.0.q.lora_A", torch.zeros(0), r"got \(0,\)"),
        ("blocks.0.q.lora_B", torch.zeros(2, 6), r"lora_B must be \(n, 2\) .* got \(2, 6\)"),
        ("blocks.0.q.lora_B", torch.full((6, 2), torch.nan), "values that are not finite"),
        ("blocks.0.q.lora_B", torch.full((6, 2), torch.inf), "values that are not finite"),
    ],
)
def test_unsound_tensors_are_not_written(name, value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a", changed={name: value})
    assert os.listdir(tmp_path) == []


DAMAGE = {
    "missing B": (lambda t: t.pop(B), r"blocks\.0\.q\.lora_B is missing beside blocks\.0\.q"),
    "missing A": (lambda t: t.pop(A), r"blocks\.0\.q\.lora_A is missing"),
    "wrong rank": (lambda t: t.update({A: torch.zeros(3, 4)}), r"must be \(2, n\) for rank 2"),
    "transposed": (lambda t: t.update({B: torch.zeros(2, 6)}), r"must be \(n, 2\) for rank 2"),
    "nan": (lambda t: t[A].fill_(torch.nan), "lora_A holds values that are not finite"),
    "strange name": (
        lambda t: t.update({"blocks.0.q.lora_A.weight": torch.zeros(2, 4)}),
        r"unexpected tensor 'blocks\.0\.q\.lora_A\.weight'",
    ),
    "adapter name": (
        lambda t: t.update({A.replace(".weight", ".default.weight"): torch.zeros(2, 4)}),
        "unexpected tensor",
    ),
    "nothing": (lambda t: t.clear(), "holds no LoRA factor"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_tensors_are_refused(damage, message, adapter):
    rewrite(adapter, damage)
    refused(adapter, message)


def test_weights_without_manifest_are_read_unless_they_are_damaged_pickled_or_gone(foreign):
    path = foreign / "adapter_model.safetensors"
    data = path.read_bytes()
    assert read_adapter(foreign).config.r == 2
    verify_adapter(foreign)
    garbled = (b"", b"\xff" * 7, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]")
    for length in (0, 5, 100, -1):
        path.write_bytes(data[:length])
        refused(foreign, r"adapter_model\.safetensors is damaged")
    for damaged in garbled:
        path.write_bytes(damaged)
        refused(foreign, r"adapter_model\.safetensors is damaged: .*save", verify_adapter)
    path.rename(path.with_name("adapter_model.bin"))
    refused(foreign, r"only a pickled adapter_model\.bin, which can run code")
    path.with_name("adapter_model.bin").unlink()
    refused(foreign, r"has no adapter_model\.safetensors$")


SCALED = r"was trained with scaling 2 \(lora_alpha 4, r 2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ("q",)}, r"contains blocks\.0\.v\.lora_A, .* does not have"),
        ({"modules_to_save": ("score",)}, r"lacks score\.trained\.bias, score\.trained\.weight"),
        ({"lora_alpha": 5}, SCALED),
        ({"use_rslora": True}, SCALED),
        ({}, r"q\.lora_A is \(2, 9\), the model has \(2, 4\)"),
    ],
)
def test_adapter_that_does_not_fit_is_refused_and_changes_nothing(options, message, adapter):
    if not options:
        rewrite(adapter, lambda t: t.update({A: torch.ones(2, 9), B: torch.ones(6, 2)}))
    model = small_model(replace(CONFIG, **options))
    with pytest.raises(ValueError, match=message):
        load_adapter(model, adapter)
    assert not model.blocks[0].q.lora_B.any()


CONFIGS = [
    ({"r": 3}, r"must be \(3, n\) for rank 3"),
    *(({"r": r}, f"r must be int, got {r!r}") for r in ("2", True, None)),
    ({"r": 0}, "r and lora_alpha must be > 0, got 0"),
    ({"lora_alpha": -1}, "r and lora_alpha must be > 0, got 2 and -1"),
    ({"use_rslora": 1}, "use_rslora must be bool, got 1"),
    ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    ({"layer_replication": [[0, 2]]}, r"layer_replication \[\[0, 2\]\] is not supported"),
    ({"some_future_variant": True}, "some_future_variant True is not supported"),
    *(({"rank_pattern": {"q": n}}, r"rank_pattern of 'q' must be") for n in (0, True, "4", 1.5)),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=str)
def test_config_fields_are_checked(fields, message, adapter):
    rewrite_config(adapter, **fields)
    refused(adapter, f"adapter.*: .*{message}")


# ---------------------------------------------------------------------------- manifest


def damage_in_place(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_weights_are_written_in_the_same_bytes_by_every_process(tmp_path):
    for number in range(8):
        write(tmp_path / str(number))
    (data,) = {(each / "adapter_model.safetensors").read_bytes() for each in tmp_path.iterdir()}
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert data[8:].startswith(b'{"__metadata__":{"format":"pt","manifest":"manifest.json"},')


@pytest.mark.parametrize("read", [read_adapter, verify_adapter])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "extra.txt"])
def test_changed_file_is_named_with_what_to_do(name, read, tmp_path):
    write(tmp_path / "adapter", write_more=lambda at: (at / "extra.txt").write_text("abc"))
    damage_in_place(tmp_path / "adapter" / name)
    message = (
        f"adapter/{name} does not have the SHA-256 in its manifest; copy the adapter again or, "
        "if the change is intended, run dschat-lora accept "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path / "adapter")


@pytest.mark.parametrize("read", [read_adapter, verify_adapter])
def test_deleted_or_unreadable_files_are_missed(read, adapter):
    weights = adapter / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(b"\xff" * len(data))
    message = (
        r"adapter_model\.safetensors does not have the SHA-256 .*; copy or save the adapter again"
    )
    refused(adapter, message, read)
    weights.unlink()
    refused(adapter, r"adapter_model\.safetensors is missing; copy or save", read)
    weights.write_bytes(data)
    write_manifest(adapter, kind="checkpoint")
    refused(adapter, r"manifest\.json is of kind 'checkpoint', not 'adapter'", read)
    (adapter / "manifest.json").unlink()
    refused(adapter, r"adapter/manifest\.json is missing; copy the adapter", read)


@with_addon("inspect")
def test_change_that_was_meant_is_accepted_by_the_command_of_the_message(tmp_path):
    directory = tmp_path / "an adapter"
    write(directory)
    path = directory / "adapter_config.json"
    path.write_text(path.read_text().replace("some/base", "moved/base"))
    with pytest.raises(ValueError, match="if the change is intended, run") as refused:
        read_adapter(directory)
    program, *command = shlex.split(str(refused.value).rpartition(" run ")[2])
    assert program == "dschat-lora"
    subprocess.run([sys.executable, "-m", "dschat_lora.__main__", *command], check=True, cwd=ROOT)
    assert read_adapter(directory).config.base_model_name_or_path == "moved/base"


def test_no_manifest_is_written_where_there_is_no_adapter(tmp_path):
    with pytest.raises(ValueError, match="is not an adapter"):
        accept_adapter(tmp_path)
    assert os.listdir(tmp_path) == []
