"""Reading of small files that may be anybody's: text, JSON and YAML, within bounds.

Nothing that they hold is dropped, or read as something else.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

#: of a file that is read whole; the largest are vocabularies and indexes of weights
MOST_BYTES = 64 * 2**20
#: of a file of options or a chat template, which people write
MOST_TYPED_BYTES = 2**18
#: of a file of options; aliases that refer to aliases can make a short file endless
MOST_VALUES = 100_000
TOO_DEEP = "it is nested too deeply"  # for Python's stack
# Of YAML's implicit types, those that are kept: a number, a date or a time stays text, which is
# then converted as if typed on the command line. YAML makes 750 of 12:30 and 8 of 010.
_KEPT = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "merge", "str", "seq", "map")}


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file, or of a link to one.

    Raises:
        OSError: if it cannot be opened or read.
        ValueError: if it is not a regular file, such as a pipe, which is not waited for, or a
            device; or if it holds more than ``most`` bytes. The message does not name it.
    """
    # A pipe that the shell has made, such as <(...), has somebody who writes to it.
    from_shell = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    with open(os.open(path, os.O_RDONLY | (0 if from_shell else os.O_NONBLOCK)), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or (from_shell and stat.S_ISFIFO(mode))):
            raise ValueError("it is not a regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return content


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """The UTF-8 text of a file; errors are those of :func:`read_bytes`."""
    return read_bytes(path, most=most).decode()


def read_json(path: Path) -> Any:
    """The JSON value in a file; errors are those of :func:`read_bytes` and :func:`parse_json`."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """A JSON value.

    Raises:
        ValueError: if the text is none, holds lists and objects nested too deeply, or an object
            has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=json_object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as json's ``object_pairs_hook``.

    Raises:
        ValueError: if it has a key twice; of the two, json would take the last.
    """
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"an object has {name!r:.200} twice")
        fields[name] = value
    return fields


def parse_yaml(text: str) -> Any:
    """A YAML value: null, switches, lists, mappings, and all else as text.

    Raises:
        ValueError: if the text is none, has a tag of another type, holds more than
            ``MOST_VALUES`` values, or a mapping has a key twice.
    """
    import yaml  # only where it is needed

    try:
        loader = _loader_class()(text)
        node = loader.get_single_node()
        if node is not None and _is_larger(node):
            raise ValueError(f"it holds more than {MOST_VALUES:,} values, its aliases written out")
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except LookupError as error:  # of what is tagged !!bool
        raise ValueError(f"{error} is neither true nor false") from error


@cache
def _loader_class() -> "type[yaml.SafeLoader]":
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, pattern) for tag, pattern in pairs if tag in _KEPT]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        yaml_constructors = {  # noqa: RUF012
            tag: construct
            for tag, construct in yaml.SafeLoader.yaml_constructors.items()
            if tag is None or tag in _KEPT
        }

        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            names = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in names:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                names.add(str(key.value))
            return node

    return Loader


def _is_larger(root: "yaml.Node") -> bool:
    """Whether the values below a node, with those of aliases each time, are too many."""
    waiting, count = [root], 0
    while waiting and count <= MOST_VALUES:
        value = waiting.pop().value
        count += 1
        for child in value if isinstance(value, list) else ():
            waiting += child if isinstance(child, tuple) else (child,)
    return count > MOST_VALUES


def named(error: OSError, path: Path) -> OSError:
    """``error`` with the name of its file, which a failed write lacks."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside the block an error of the disk gets the name of its file, as :func:`named` does."""
    try:
        yield
    except OSError as error:
        if (renamed := named(error, path)) is error:
            raise
        raise renamed from error
