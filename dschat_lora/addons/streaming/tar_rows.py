"""Rows of tar files in WebDataset's form."""

import json
import tarfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import IO, Any, cast

from dschat_lora.config.files import TOO_DEEP, json_object

# The column of files that are no text.
_MEDIA = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm"), "images"),
    **dict.fromkeys(("mp4", "webm", "mkv", "mov", "avi"), "videos"),
    **dict.fromkeys(("mp3", "wav", "flac", "ogg", "opus", "m4a"), "audios"),
}


def tar_rows(file: IO[bytes], *, most: int) -> Iterator[tuple[dict[str, Any], str | None] | None]:
    """Columns of each sample, or what is wrong with it; None for one of more than ``most`` bytes.

    A sample is the members that stand together and share a key: their path up to the first dot of
    the name. An object in ``.json`` gives the columns that it has, ``.txt`` the column ``text``,
    another file the column of its extension. Images, videos and sound stand in the columns
    ``images``, ``videos`` and ``audios``. Files without a key or an extension, such as those that
    macOS adds, are none of a sample.

    Raises:
        OSError: if the file is damaged.
    """
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for _, group in groupby(_members(archive), key=lambda member: _parts(member)[0]):
                yield _row(archive, group, most)
    except tarfile.TarError as error:
        raise OSError(str(error)) from error


def _row(
    archive: tarfile.TarFile, members: Iterable[tarfile.TarInfo], most: int
) -> tuple[dict[str, Any], str | None] | None:
    values: dict[str, Any] = {}
    problem, size = None, 0
    for member in members:
        size += member.size + tarfile.BLOCKSIZE
        if size > most:
            return None
        try:
            _add(values, member, cast(IO[bytes], archive.extractfile(member)))
        except RecursionError:
            problem = TOO_DEEP
        except ValueError as error:
            problem = f"{member.name}: {error}"
    return ({}, problem) if problem else (values, None)


def _members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        if member.isfile() and all(part.rpartition("/")[2] for part in _parts(member)):
            yield member
        archive.members.clear()  # type: ignore[attr-defined]  # those that were read


def _parts(member: tarfile.TarInfo) -> tuple[str, str]:
    """The key and the extension."""
    folder, slash, name = member.name.rpartition("/")
    key, _, extension = name.partition(".")
    return folder + slash + key, extension.lower()


def _add(values: dict[str, Any], member: tarfile.TarInfo, file: IO[bytes]) -> None:
    extension = _parts(member)[1]
    if column := _MEDIA.get(extension.rpartition(".")[2]):
        # A picture as the parts of Parquet have it; of others it is enough to refuse the row.
        value = {"bytes": file.read(), "path": member.name} if column == "images" else member.name
        values.setdefault(column, []).append(value)
    elif extension == "json":
        value = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=json_object)
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        values.update(value)
    elif extension in ("txt", "text"):
        values["text"] = file.read().decode("utf-8-sig")
    else:
        content = file.read()
        try:
            values[extension] = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            values[extension] = content  # which no column that is read may be
