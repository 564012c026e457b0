"""YAML and JSON that a person wrote, of which nothing is dropped or read as something else."""

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

# Of YAML's implicit types, those that are kept: a number, a date or a time stays text, which is
# then converted as if typed on the command line. YAML makes 750 of 12:30 and 8 of 010.
_KEPT = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "merge", "str", "seq", "map")}


def yaml_value(text: str) -> Any:
    """The value of a YAML text: null, switches, lists, mappings, and all else as text.

    Raises:
        ValueError: with the reason, if it is no YAML, has a tag of another type, or a mapping has
            a key twice.
    """
    import yaml  # only where there is one

    loader = _loader_class()(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:  # of what is tagged !!bool
        raise ValueError(f"{error} is neither true nor false") from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    finally:
        loader.dispose()


def json_value(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: with the reason, if it is no JSON, or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=json_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as json's ``object_pairs_hook``.

    Raises:
        ValueError: if it has a key twice; of the two, json would take the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twin!r:.200} twice")
    return found


@cache
def _loader_class() -> "type[yaml.SafeLoader]":
    import yaml

    class Loader(yaml.SafeLoader):
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
                        problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                    )
                names.add(str(key.value))
            return node

    return Loader
