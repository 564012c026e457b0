"""Errors of step 3 that every rank raises together."""

import torch


class UserFunctionError(Exception):
    """A function of the user's failed; the cause is its error. Raised on every rank."""

    what = "a function"


class FullWhileDecodingError(torch.OutOfMemoryError):
    """The GPU was full while responses were decoded."""


class FullAfterReleaseError(torch.OutOfMemoryError):
    """The GPU was full in another pass, although decoding kept nothing."""
