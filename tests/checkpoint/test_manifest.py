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

NAMES = ["data/order.json", "m.safetensors", "state.json"]


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
    """Not itself, nor links; alike each time, whatever the bytes of a name."""
    first = (saved / "manifest.json").read_bytes()
    assert first.startswith(b'{\n  "files": {\n    "data/order.json": {\n      "bytes": 12,\n')
    (saved / "link").symlink_to(saved / "state.json")
    (saved / "linked").symlink_to(saved / "data", target_is_directory=True)
    write_manifest(saved, kind="checkpoint")
    assert (saved / "manifest.json").read_bytes() == first
    odd = os.fsdecode(b"\xff \xc3\xa9\n")
    (saved / odd).write_text("x")
    (saved / "data" / "manifest.json").write_text("{}")
    write_manifest(saved, kind="checkpoint")
    content = read_manifest(saved, kind="checkpoint")
    assert content == verify(saved, kind="checkpoint")
    assert (content["format"], content["kind"]) == (1, "checkpoint")
    w, step = {"dtype": "F32", "shape": [2, 3]}, {"dtype": "I64", "shape": []}
    weights = entry_of((saved / "m.safetensors").read_bytes())
    assert content["files"] == {
        "data/order.json": entry_of(b'{"epoch": 1}'),
        "data/manifest.json": entry_of(b"{}"),
        "m.safetensors": weights | {"tensors": {"w": w, "step": step}},
        "state.json": entry_of(b"{}"),
        odd: entry_of(b"x"),
    }


def test_long_files_are_hashed_whole(saved):
    data = bytes(range(256)) * 10_000  # two blocks and a half
    (saved / "long").write_bytes(data)
    write_manifest(saved, kind="checkpoint")
    assert read_manifest(saved, kind="checkpoint")["files"]["long"] == entry_of(data)
    for position in (0, 2**20 - 1, 2**20, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        (saved / "long").write_bytes(changed)
        refused(saved, "long does not have the SHA-256")


def test_weights_without_header_get_no_manifest(saved):
    (saved / "n.safetensors").write_bytes(b"short")
    (saved / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"n\.safetensors is damaged: 5 bytes do not hold"):
        write_manifest(saved, kind="checkpoint")
    assert not (saved / "manifest.json").exists()


def test_manifests_need_the_standard_library_alone():
    code = (
        "import sys, dschat_lora.checkpoint.manifest, dschat_lora.checkpoint.history\n"
        "import dschat_lora.checkpoint.adapter_config\n"
        "assert not {'torch', 'safetensors', 'numpy', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---------------------------------------------------------------------------- damaged manifests


def test_changed_bits_and_lost_and_added_bytes_of_a_manifest_are_found(saved):
    path = saved / "manifest.json"
    data = path.read_bytes()
    # All places by `make test-all`, else a spread of them.
    for position in range(0, len(data), 1 if ALL else 5):
        before, (byte, *_), after = data[:position], data[position:], data[position + 1 :]
        flips = [bytes([byte ^ 1 << bit]) for bit in range(8)]
        for instead in (*flips, b"", bytes([byte, 32]), bytes([byte, 10])):
            path.write_bytes(before + instead + after)
            refused(saved, r"saved/manifest\.json is damaged: ")
        path.write_bytes(before)
        refused(saved, r"saved/manifest\.json is damaged: ")


NO_MANIFESTS = [b"", b"[]", b"null", b"{}", b"{}\n", b"NaN\n", b'{\n  "a": NaN\n}\n']
NO_MANIFESTS += [b'{\n  "a": 1e999\n}\n', b"\xff\xfe\x00", b"1" * 5000, b"[" * 100_000]
NO_MANIFESTS += [b'{"files": {}, "files": {}}', "{}\n".encode("utf-16")]


def test_what_is_no_manifest_is_reported_as_damage(saved):
    path = saved / "manifest.json"
    text = path.read_text()
    for data in NO_MANIFESTS:
        path.write_bytes(data)
        refused(saved, r"manifest\.json is damaged: ")
    # Even if the hash is right.
    path.write_text(text.replace('  "format": 1,\n', '  "format": 1,\n  "format": 1,\n'))
    refused(saved, "is damaged: an object has 'format' twice")
    path.write_text(text)
    for files in (
        *(None, [], "x", {"a": None}, {"a": {}}, {"a": {"bytes": 1}}, {"a": {"sha256": "x"}}),
        *({"a": {"bytes": 2, "sha256": None}}, {"a": {"bytes": 1.0, "sha256": "x"}}),
    ):
        forge(saved, files=files)
        refused(saved, r"manifest\.json is damaged: it lacks the size or SHA-256 of a file")
    path.unlink()
    refused(saved, r"saved/manifest\.json is missing$")
    path.mkdir()
    refused(saved, r"saved/manifest\.json cannot be read: Is a directory$")


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


def test_manifest_of_another_kind_or_format_is_refused(saved):
    with pytest.raises(DamagedError, match=r"manifest\.json is of kind 'checkpoint', not 'adapt"):
        read_manifest(saved, kind="adapter")
    forge(saved, format=2)
    with pytest.raises(ValueError, match="has format 2, this version reads 1; use the") as error:
        verify(saved, kind="checkpoint")
    assert not isinstance(error.value, DamagedError)  # or a resume would pass over it


# ---------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("name", NAMES)
def test_every_changed_byte_and_other_length_of_a_file_is_found(name, saved):
    data = (saved / name).read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x10
        (saved / name).write_bytes(changed)
        refused(saved, f"saved/{name} does not have the SHA-256 in its manifest$")
    for changed in (data + b"\0", data[:-1], data[:1], b""):
        (saved / name).write_bytes(changed)
        says = f"has {len(changed)} bytes, its manifest says {len(data)}$"
        refused(saved, f"saved/{name} {says}")
    for other in NAMES[NAMES.index(name) :]:  # the first by name is reported
        (saved / other).unlink()
    refused(saved, f"saved/{name} is missing$")


def test_missing_directories_and_unreadable_files_are_found(saved, monkeypatch):
    opened = Path.open

    def deny(path, *args, **kwargs):
        if path.name == "state.json":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", deny)
        refused(saved, r"saved/state\.json cannot be read: Permission denied$")
    (saved / "data" / "order.json").unlink()
    (saved / "data").rmdir()
    refused(saved, r"saved/data/order\.json is missing$")
    (saved / "data").write_text("")
    refused(saved, r"saved/data/order\.json cannot be read: Not a directory$")


def test_unchecked_file_may_differ_or_be_gone_and_others_be_added(saved):
    (saved / "notes.txt").write_text("mine")
    (saved / "state.json").write_text("changed")
    unchecked = frozenset({"state.json", "never.there"})
    verify(saved, kind="checkpoint", unchecked=unchecked)
    (saved / "state.json").unlink()
    verify(saved, kind="checkpoint", unchecked=unchecked)
    (saved / "data" / "order.json").unlink()
    with pytest.raises(DamagedError, match=r"order\.json is missing"):
        verify(saved, kind="checkpoint", unchecked=unchecked)


# ---------------------------------------------------------------------------- names and links

OUTSIDE = r"manifest\.json lists .*, which lies outside "


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, OUTSIDE) for name in ("../out", "data/../../out", "data/../state.json", "a\0b")),
        *((name, "is not a regular file") for name in ("", ".", "data", "pipe")),
        ("x" * 300, "cannot be read: File name too long"),
        ("state.json/x", "cannot be read: Not a directory"),
        ("ABS", OUTSIDE),
    ],
)
def test_listed_name_that_is_no_file_of_the_directory_is_refused(name, message, saved):
    (saved.parent / "out").write_bytes(b"x")
    os.mkfifo(saved / "pipe")
    name = str(saved.parent / "out") if name == "ABS" else name
    forge(saved, files={name: entry_of(b"x")})
    refused(saved, message)


def test_links_are_followed_and_their_content_checked(saved):
    path, outside = saved / "state.json", saved.parent / "outside.json"
    path.rename(outside)
    path.symlink_to(outside)  # as the hub's cache keeps files
    (saved / "data" / "order.json").rename(saved / "kept.json")
    (saved / "data" / "order.json").symlink_to("../kept.json")
    (saved.parent / "alias").symlink_to(saved, target_is_directory=True)
    verify(saved.parent / "alias", kind="checkpoint")
    outside.write_bytes(outside.read_bytes()[:-1] + b" ")
    refused(saved, r"saved/state\.json does not have the SHA-256")
    for target, message in (("nowhere", "is missing"), (path, "cannot be read: Too many levels")):
        path.unlink()
        path.symlink_to(target)
        refused(saved, rf"state\.json {message}")


# ---------------------------------------------------------------------------- headers


def with_header(path, text, *, length=None, data=b""):
    text = text if isinstance(text, bytes) else text.encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def test_header_names_tensors_and_metadata(tmp_path):
    text = '{"__metadata__":{"a":"b"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = with_header(tmp_path / "w.safetensors", text, data=b"\0" * 8)
    assert safetensors_header(path) == json.loads(text)
    assert safetensors_header(with_header(path, "{}")) == {}
    path.unlink()
    with pytest.raises(DamagedError, match=r"w\.safetensors cannot be read: No such file"):
        safetensors_header(path)


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("{}", 3, "10 bytes do not hold its header"),
        ("{}", 2**64 - 1, "10 bytes do not hold its header"),
        ("{}", 1, "Expecting property name"),
        ("", 0, "Expecting value"),
        (b"\xff\xff", 2, "codec can't decode"),
        ("[]", 2, "not a JSON object of tensors"),
        ('{"__metadata__":[]}', 19, "not a JSON object of tensors"),
        ('{"w":[]}', 8, "lacks dtype or shape of 'w'"),
        ('{"w":{"dtype":"F32"}}', 21, "lacks dtype or shape of 'w'"),
        ("[" * 100_000, 100_000, "nested too deeply"),
        *((size, None, f"{size} bytes do not hold its header") for size in range(8)),
    ],
    ids=range(18),
)
def test_garbled_header_is_reported_with_its_file(text, length, message, tmp_path):
    path = tmp_path / "w.safetensors"
    if length is None:  # shorter than a length
        path.write_bytes(b"\0" * text)
    else:
        with_header(path, text, length=length)
    with pytest.raises(DamagedError, match=rf"w\.safetensors is damaged: .*{message}"):
        safetensors_header(path)
