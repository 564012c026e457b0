"""A server of the Tinker API, and its own client."""

from importlib.util import find_spec

if find_spec("tinker") is None or find_spec("uvicorn") is None:  # the extra [tinker]
    collect_ignore_glob = ["test_tinker_[!l]*.py"]
else:
    from addons.tinker.served import *  # noqa: F403
