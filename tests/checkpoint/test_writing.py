"""Errors of the disk that libraries raise as errors of their own."""

from pathlib import Path

import pytest
from safetensors import SafetensorError

from dschat_lora.checkpoint.tensors import writing

OF_THE_DISK = [
    SafetensorError("Error while serializing: I/O error: No space left on device"),
    Exception("No space left on device (os error 28)"),  # tokenizers
    RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 21440 vs 21328"),
    RuntimeError("basic_ios::clear: iostream error"),
]


@pytest.mark.parametrize("error", OF_THE_DISK, ids=str)
def test_what_a_library_raises_on_a_full_disk_names_the_file(error):
    with (
        pytest.raises(OSError, match=r"^there cannot be written: .*") as caught,
        writing(Path("there")),
    ):
        raise error
    assert str(error) in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("a shape"), ValueError("a value"), KeyError("a")])
def test_another_error_stays_what_it_is(error):
    with pytest.raises(type(error)) as caught, writing(Path("there")):
        raise error
    assert caught.value is error
