"""Reading of small files that may be anybody's: text, JSON and YAML, within bounds."""

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml import Node

#: of a file that is read whole; the largest are vocabularies and indexes of weights
MOST_BYTES = 64 * 2**20
#: of a file of options or a chat template, which people write
MOST_TYPED_BYTES = 2**18
#: of a file of options; aliases that refer to aliases can make a short file endless
MOST_VALUES = 100_000


def read_bytes(path: Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file, or of a link to one.

    Raises:
        OSError: if it cannot be opened or read.
        ValueError: if it is no regular file, such as a pipe, which is not waited for, or a
            device; or if it holds more than ``most`` bytes. The message does not name it.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it holds more than {most:,} bytes")
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
        ValueError: if the text is none, or holds lists and objects nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """A YAML value of plain types.

    Raises:
        ValueError: if the text is none, or holds more than ``MOST_VALUES`` values.
    """
    import yaml  # only where it is needed

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None and _is_larger(node):
            raise ValueError(f"it holds more than {MOST_VALUES:,} values, its aliases written out")
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (LookupError, AttributeError, OverflowError) as error:
        # What the constructors of YAML's types raise where a text does not fit its type.
        raise ValueError(f"a value is not of the type that its tag says ({error})") from error


def _is_larger(root: "Node") -> bool:
    """Whether the values below a node, with those of aliases each time, are too many."""
    waiting, count = [root], 0
    while waiting and count <= MOST_VALUES:
        value = waiting.pop().value
        count += 1
        for child in value if isinstance(value, list) else ():
            waiting += child if isinstance(child, tuple) else (child,)
    return count > MOST_VALUES
