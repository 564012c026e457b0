"""``manifest.json``: sizes and hashes of a directory's files, to find damage before loading."""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from dschat_lora.config.files import MOST_BYTES, parse_json, read_bytes, read_json
from dschat_lora.config.staging import staged_file

MANIFEST = "manifest.json"
_FORMAT = 1
_DTYPE = re.compile(r"[A-Z]+(\d*)")  # with the bits of a value; BOOL has a byte
WEIGHTS_INDEX = "model.safetensors.index.json"


class DamagedError(ValueError):
    """A directory is not what its manifest says; the message names the file."""


def write_manifest(directory: Path, *, kind: str) -> None:
    """Describe every regular file below ``directory`` in its ``manifest.json``.

    An earlier one stays until it is whole. Call it last, and on one rank; ``kind`` is
    ``checkpoint`` or ``adapter``.

    Raises:
        DamagedError: if a ``.safetensors`` file has no readable header.
        OSError: if the disk refuses.
    """
    content = _described(directory, kind)
    with staged_file(directory / MANIFEST) as staging:
        staging.write_bytes(content)


def _described(directory: Path, kind: str) -> bytes:
    own, files = (directory / MANIFEST, directory / f".{MANIFEST}.tmp"), dict[str, Any]()
    for path in directory.rglob("*"):
        if not path.is_file() or path.is_symlink() or path in own:
            continue
        entry = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        if path.suffix == ".safetensors":
            entry["tensors"] = {
                name: {"dtype": tensor["dtype"], "shape": tensor["shape"]}
                for name, tensor in tensors_of(safetensors_header(path)).items()
            }
        files[path.relative_to(directory).as_posix()] = entry
    content = {"format": _FORMAT, "kind": kind, "files": files}
    return _canonical({**content, "sha256": _own_sha256(content)})


def read_manifest(directory: Path, *, kind: str) -> dict[str, Any]:
    """The manifest of ``directory``, checked against its own hash.

    It has ``format``, ``kind``, ``sha256`` and ``files``: by name relative to ``directory``, the
    ``bytes`` and ``sha256`` of each and the ``tensors`` of a ``.safetensors`` file, with ``dtype``
    and ``shape``.

    Raises:
        DamagedError: if it is missing, differs by a byte from what was written, or is of
            another kind.
        ValueError: if it is sound, and of a format that this version does not read.
    """
    path = directory / MANIFEST
    try:
        data = read_bytes(path)
        content = parse_json(data)
        if not isinstance(content, dict) or data != _canonical(content):
            raise ValueError("it is not in the form that is written")
        if content.get("sha256") != _own_sha256(content):
            raise ValueError("its SHA-256 does not match the one it records")
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {content.get('format')!r}, this version reads {_FORMAT}; "
            "use the version that wrote it"
        )
    if content.get("kind") != kind:
        raise DamagedError(f"{path} is of kind {content.get('kind')!r}, not {kind!r}")
    if not _has_files(content):
        raise DamagedError(f"{path} is damaged: it lacks the size or SHA-256 of a file")
    return content


def verify(
    directory: Path, *, kind: str, unchecked: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The manifest of ``directory``, after a check of every file's size and SHA-256.

    Files it does not list are no damage; ``unchecked`` ones may differ or be missing.

    Raises:
        DamagedError: at the first file that is missing, unreadable, or of another size or
            SHA-256; and as :func:`read_manifest`.
    """
    content = read_manifest(directory, kind=kind)
    for name, entry in content["files"].items():
        if name not in unchecked:
            _check_file(directory, name, entry)
    return content


def safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: ``dtype``, ``shape`` and ``data_offsets`` by tensor.

    A file may have ``__metadata__`` as well.

    Raises:
        DamagedError: naming ``path``, if it cannot be read or holds no such header.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MOST_BYTES):
                raise ValueError(f"{size} bytes do not hold its header")
            header = parse_json(file.read(length))
        if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
            raise ValueError("its header is not a JSON object of tensors")
        _check_layout(tensors_of(header), size - 8 - length)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    return header


def weight_map(index: Path) -> dict[str, str]:
    """The file beside ``index`` that holds each tensor of a model in several.

    Raises:
        DamagedError: naming the index, if it names none, or a file elsewhere or that is none.
    """
    try:
        content = read_json(index)
    except (OSError, ValueError) as error:
        raise DamagedError(f"{index} cannot be read: {error}") from None
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise DamagedError(f"{index} is damaged: it has no object weight_map")
    for name in names.values():
        # One of the hub that is not there yet is fetched.
        if not isinstance(name, str) or name in ("", "..") or name != PurePosixPath(name).name:
            raise DamagedError(f"{index} is damaged: {name!r} is not the name of a file beside it")
        if (index.parent / name).exists() and not (index.parent / name).is_file():
            raise DamagedError(f"{index.parent / name} is not a regular file")
    return names


def _check_layout(entries: Mapping[str, Any], size: int) -> None:
    """Refuse tensors that are not ``size`` bytes in a row, each as many as its shape says.

    Raises:
        ValueError: naming the first.
    """
    spans: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape, span = map(fields.get, ("dtype", "shape", "data_offsets"))
        kind = _DTYPE.match(dtype) if isinstance(dtype, str) else None
        if kind is None or not (_are_counts(shape) and _are_counts(span) and len(span) == 2):
            raise ValueError(f"its header lacks dtype or shape of {name!r}, or its data_offsets")
        if 8 * (span[1] - span[0]) != int(kind[1] or 8) * math.prod(shape):
            raise ValueError(f"{name!r} of the type {dtype} and shape {shape} has other bytes")
        spans.append((span[0], span[1], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ValueError(f"{name!r} begins at byte {start}, not at {end}")
        end = stop
    if end != size:
        raise ValueError(f"its tensors are {end} bytes, and it has {size}")


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def tensors_of(header: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a safetensors file's header that are tensors, by name."""
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _check_file(directory: Path, name: str, entry: Mapping[str, Any]) -> None:
    listed = PurePosixPath(name)
    if listed.is_absolute() or ".." in listed.parts or "\0" in name:
        raise DamagedError(f"{directory / MANIFEST} lists {name!r}, which lies outside {directory}")
    path = directory / name
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path} is not a regular file")
        if status.st_size != entry["bytes"]:
            raise DamagedError(
                f"{path} has {status.st_size} bytes, its manifest says {entry['bytes']}"
            )
        digest = _sha256(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeEncodeError:
        raise DamagedError(f"{directory / MANIFEST} lists {name!a}, which names no file") from None
    if digest != entry["sha256"]:
        raise DamagedError(f"{path} does not have the SHA-256 in its manifest")


def _has_files(content: Mapping[str, Any]) -> bool:
    files = content.get("files")
    return isinstance(files, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        for entry in files.values()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_sha256(content: Mapping[str, Any]) -> str:
    described = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(_canonical(described)).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    """``content`` as JSON of sorted keys."""
    text = json.dumps(content, indent=2, sort_keys=True)
    return (text + "\n").encode("ascii")
