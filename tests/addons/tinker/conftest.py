"""A server of the Tinker API, and its own client."""

from importlib.util import find_spec

if find_spec("tinker") and find_spec("uvicorn"):  # else what uses them is skipped
    from addons.tinker.served import *  # noqa: F403
