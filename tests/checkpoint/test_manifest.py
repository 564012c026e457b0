"""Manifests: what was written is described, and every difference from it is found."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dschat_lora.checkpoint.manifest import (
    DamagedError,
    read_manifest,
    safetensors_header,
    verify,
    write_manifest,
)
from helpers.spread import ALL


@pytest.fixture
def saved(tmp_path):
    """A small directory with a manifest."""
    directory = tmp_path / "saved"
    (directory / "data").mkdir(parents=True)
    save_file({"w": torch.zeros(2, 3), "step": torch.tensor(7)}, directory / "m.safetensors")
    (directory / "data" / "order.json").write_text('{"epoch": 1}')
    (directory / "state.json").write_text("{}")
    write_manifest(directory, kind="checkpoint")
    return directory


def canonical(content):
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def forge(directory, **changes):
    """Write a manifest whose own hash is right, whatever else it says."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text()) | changes
    del content["sha256"]
    content["sha256"] = hashlib.sha256(canonical(content)).hexdigest()
    path.write_bytes(canonical(content))


def entry_of(data):
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def refused(directory, message):
    with pytest.raises(DamagedError, match=message):
        verify(directory, kind="checkpoint")


# ---------------------------------------------------------------------------- writing


def test_manifest_lists_every_file_with_size_hash_and_tensors(saved):
    weights = (saved / "m.safetensors").read_bytes()
    content = read_manifest(saved, kind="checkpoint")
    assert content == verify(saved, kind="checkpoint")
    assert {name: content[name] for name in ("format", "kind")} == {
        "format": 1,
        "kind": "checkpoint",
    }
    assert content["files"] == {
        "data/order.json": entry_of(b'{"epoch": 1}'),
        "m.safetensors": entry_of(weights)
        | {
            "tensors": {
                "w": {"dtype": "F32", "shape": [2, 3]},
                "step": {"dtype": "I64", "shape": []},
            }
        },
        "state.json": entry_of(b"{}"),
    }


def test_manifest_is_readable_and_written_alike_each_time(saved):
    first = (saved / "manifest.json").read_bytes()
    assert first.startswith(b'{\n  "files": {\n    "data/order.json": {\n      "bytes": 12,\n')
    write_manifest(saved, kind="checkpoint")
    assert (saved / "manifest.json").read_bytes() == first


def test_long_files_are_hashed_whole(saved):
    data = bytes(range(256)) * 10_000  # two blocks and a half
    (saved / "long").write_bytes(data)
    write_manifest(saved, kind="checkpoint")
    assert read_manifest(saved, kind="checkpoint")["files"]["long"] == entry_of(data)
    for position in (0, 2**20 - 1, 2**20, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        (saved / "long").write_bytes(changed)
        refused(saved, "long has another SHA-256")


def test_names_of_any_bytes_survive(saved):
    name = os.fsdecode(b"\xff \xc3\xa9\n")
    (saved / name).write_text("x")
    write_manifest(saved, kind="checkpoint")
    assert name in verify(saved, kind="checkpoint")["files"]


def test_links_and_the_manifest_itself_are_not_listed(saved):
    (saved / "link").symlink_to(saved / "state.json")
    (saved / "linked").symlink_to(saved / "data", target_is_directory=True)
    (saved / "data" / "manifest.json").write_text("{}")
    write_manifest(saved, kind="checkpoint")
    names = read_manifest(saved, kind="checkpoint")["files"].keys()
    assert names == {"data/manifest.json", "data/order.json", "m.safetensors", "state.json"}


def test_weights_without_header_get_no_manifest(saved):
    (saved / "n.safetensors").write_bytes(b"short")
    (saved / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"n\.safetensors is damaged: 5 bytes do not hold"):
        write_manifest(saved, kind="checkpoint")
    assert not (saved / "manifest.json").exists()


def test_manifests_need_the_standard_library_alone():
    code = (
        "import sys, dschat_lora.checkpoint.manifest, dschat_lora.checkpoint.history\n"
        "assert not {'torch', 'safetensors', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---------------------------------------------------------------------------- damaged manifests

# All places by `make test-all`, else a spread of them.
EVERY = 1 if ALL else 5


def test_changed_bits_of_a_manifest_are_found(saved):
    path = saved / "manifest.json"
    data = path.read_bytes()
    for position in range(0, len(data), EVERY):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            with pytest.raises(DamagedError, match=r"saved/manifest\.json is damaged: "):
                read_manifest(saved, kind="checkpoint")


def test_lost_and_added_bytes_of_a_manifest_are_found(saved):
    path = saved / "manifest.json"
    data = path.read_bytes()
    for position in range(0, len(data) + 1, EVERY):
        before, after = data[:position], data[position:]
        for changed in (before + after[1:], before + b" " + after, before + b"\n" + after, before):
            if changed == data:
                continue
            path.write_bytes(changed)
            with pytest.raises(DamagedError, match=r"saved/manifest\.json is damaged: "):
                read_manifest(saved, kind="checkpoint")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b"{}\n",
        b"NaN\n",
        b'{\n  "a": NaN\n}\n',
        b'{\n  "a": 1e999\n}\n',
        b"\xff\xfe\x00",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"files": {}, "files": {}}',
        "{}\n".encode("utf-16"),
    ],
    ids=range(13),
)
def test_what_is_no_manifest_is_reported_as_damage(data, saved):
    (saved / "manifest.json").write_bytes(data)
    refused(saved, r"manifest\.json is damaged: ")


def test_nesting_of_any_depth_is_reported_as_damage(saved):
    # Reading, writing and hashing reach their limits at different depths.
    written, content = [], {}
    for _ in range(150):
        content = {"files": content}
        written.append(canonical(content))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 120)
    try:
        for data in written:
            (saved / "manifest.json").write_bytes(data)
            refused(saved, r"manifest\.json is damaged: ")
    finally:
        sys.setrecursionlimit(limit)


def test_repeated_name_is_damage_even_if_the_hash_is_right(saved):
    path = saved / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace('  "format": 1,\n', '  "format": 1,\n  "format": 1,\n'))
    refused(saved, "is damaged: an object has 'format' twice")


def test_missing_manifest_is_reported(saved):
    (saved / "manifest.json").unlink()
    refused(saved, r"saved/manifest\.json is missing$")
    (saved / "manifest.json").mkdir()
    refused(saved, r"saved/manifest\.json cannot be read: Is a directory$")


def test_manifest_of_another_kind_or_format_is_refused(saved):
    with pytest.raises(DamagedError, match=r"manifest\.json is of kind 'checkpoint', not 'adapt"):
        read_manifest(saved, kind="adapter")
    forge(saved, format=2)
    with pytest.raises(ValueError, match="has format 2, this version reads 1; use the") as error:
        verify(saved, kind="checkpoint")
    assert not isinstance(error.value, DamagedError)  # or a resume would pass over it


@pytest.mark.parametrize(
    "files",
    [
        *(None, [], "x", {"a": None}, {"a": {}}, {"a": {"bytes": 1}}, {"a": {"sha256": "x"}}),
        *({"a": {"bytes": 2, "sha256": None}}, {"a": {"bytes": 1.0, "sha256": "x"}}),
    ],
    ids=range(9),
)
def test_manifest_without_sizes_or_hashes_is_refused(files, saved):
    forge(saved, files=files)
    refused(saved, r"manifest\.json is damaged: it lacks the size or SHA-256 of a file")


# ---------------------------------------------------------------------------- damaged files

NAMES = ["m.safetensors", "state.json", "data/order.json"]


@pytest.mark.parametrize("name", NAMES)
def test_every_changed_byte_of_a_file_is_found(name, saved):
    data = (saved / name).read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x10
        (saved / name).write_bytes(changed)
        refused(saved, f"saved/{name} has another SHA-256 than its manifest says$")


@pytest.mark.parametrize("name", NAMES)
def test_file_of_another_length_is_found(name, saved):
    data = (saved / name).read_bytes()
    for changed in (data + b"\0", data[:-1], data[:1], b""):
        (saved / name).write_bytes(changed)
        says = f"has {len(changed)} bytes, its manifest says {len(data)}$"
        refused(saved, f"saved/{name} {says}")


@pytest.mark.parametrize("name", NAMES)
def test_missing_file_is_found(name, saved):
    (saved / name).unlink()
    refused(saved, f"saved/{name} is missing$")


def test_missing_directory_is_found(saved):
    (saved / "data" / "order.json").unlink()
    (saved / "data").rmdir()
    refused(saved, r"saved/data/order\.json is missing$")
    (saved / "data").write_text("")
    refused(saved, r"saved/data/order\.json cannot be read: Not a directory$")


def test_first_bad_file_by_name_is_reported(saved):
    (saved / "state.json").unlink()
    (saved / "data" / "order.json").unlink()
    refused(saved, r"data/order\.json is missing")


def test_unreadable_file_is_reported(saved, monkeypatch):
    opened = Path.open

    def deny(path, *args, **kwargs):
        if path.name == "state.json":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)
    refused(saved, r"saved/state\.json cannot be read: Permission denied$")


def test_additional_files_are_no_damage(saved):
    (saved / "notes.txt").write_text("mine")
    verify(saved, kind="checkpoint")


def test_unchecked_file_may_differ_or_be_gone(saved):
    (saved / "state.json").write_text("changed")
    unchecked = frozenset({"state.json", "never.there"})
    verify(saved, kind="checkpoint", unchecked=unchecked)
    (saved / "state.json").unlink()
    verify(saved, kind="checkpoint", unchecked=unchecked)
    (saved / "data" / "order.json").unlink()
    with pytest.raises(DamagedError, match=r"order\.json is missing"):
        verify(saved, kind="checkpoint", unchecked=unchecked)


# ---------------------------------------------------------------------------- names and links


@pytest.mark.parametrize("name", ["../out", "data/../../out", "data/../state.json", "a\0b", "ABS"])
def test_listed_name_that_leaves_the_directory_is_refused(name, saved):
    (saved.parent / "out").write_bytes(b"x")
    name = str(saved.parent / "out") if name == "ABS" else name
    forge(saved, files={name: entry_of(b"x")})
    refused(saved, r"manifest\.json lists .*, which lies outside ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is no regular file"),
        (".", "is no regular file"),
        ("data", "data is no regular file"),
        ("pipe", "pipe is no regular file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("state.json/x", "cannot be read: Not a directory"),
    ],
)
def test_listed_name_that_is_no_file_is_refused(name, message, saved):
    os.mkfifo(saved / "pipe")
    forge(saved, files={name: entry_of(b"x")})
    refused(saved, message)


def test_link_out_of_the_directory_is_followed_and_its_content_checked(saved):
    path, outside = saved / "state.json", saved.parent / "outside.json"
    path.rename(outside)
    path.symlink_to(outside)  # as the hub's cache keeps files
    verify(saved, kind="checkpoint")
    outside.write_bytes(outside.read_bytes()[:-1] + b" ")
    refused(saved, r"saved/state\.json has another SHA-256")


def test_links_within_and_to_the_directory_are_followed(saved):
    (saved / "state.json").rename(saved / "kept.json")
    (saved / "state.json").symlink_to("kept.json")
    verify(saved, kind="checkpoint")
    (saved.parent / "alias").symlink_to(saved, target_is_directory=True)
    verify(saved.parent / "alias", kind="checkpoint")


def test_broken_and_circular_links_are_refused(saved):
    (saved / "state.json").unlink()
    (saved / "state.json").symlink_to("nowhere")
    refused(saved, r"state\.json is missing")
    (saved / "state.json").unlink()
    (saved / "state.json").symlink_to("state.json")
    refused(saved, r"state\.json cannot be read: Too many levels")


# ---------------------------------------------------------------------------- headers


def with_header(path, text, *, length=None, data=b""):
    text = text if isinstance(text, bytes) else text.encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def test_header_names_tensors_and_metadata(tmp_path):
    text = '{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = with_header(tmp_path / "w.safetensors", text, data=b"\0" * 8)
    assert safetensors_header(path) == {
        "__metadata__": {"a": "b"},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }


def test_header_of_a_file_without_tensors_is_empty(tmp_path):
    assert safetensors_header(with_header(tmp_path / "w.safetensors", "{}")) == {}


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("{}", 3, "10 bytes do not hold its header"),
        ("{}", 2**64 - 1, "10 bytes do not hold its header"),
        ("{}", 1, "Expecting property name"),
        ("", 0, "Expecting value"),
        (b"\xff\xff", 2, "codec can't decode"),
        ("[]", 2, "no JSON object of tensors"),
        ('{"__metadata__":[]}', 19, "no JSON object of tensors"),
        ('{"w":[]}', 8, "lacks dtype or shape of 'w'"),
        ('{"w":{"dtype":"F32"}}', 21, "lacks dtype or shape of 'w'"),
        ("[" * 100_000, 100_000, "nested too deeply"),
    ],
    ids=range(10),
)
def test_garbled_header_is_reported_with_its_file(text, length, message, tmp_path):
    path = with_header(tmp_path / "w.safetensors", text, length=length)
    with pytest.raises(DamagedError, match=rf"w\.safetensors is damaged: .*{message}"):
        safetensors_header(path)


@pytest.mark.parametrize("size", range(8))
def test_file_shorter_than_a_length_is_reported(size, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(DamagedError, match=f"{size} bytes do not hold its header"):
        safetensors_header(tmp_path / "w.safetensors")


def test_absent_weights_are_reported(tmp_path):
    with pytest.raises(DamagedError, match=r"w\.safetensors cannot be read: No such file"):
        safetensors_header(tmp_path / "w.safetensors")
