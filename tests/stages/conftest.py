"""Fixtures of :mod:`helpers.step1` for the tests of whole commands."""

from helpers.step1 import refused

__all__ = ["refused"]
