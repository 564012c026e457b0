"""What the tests for a GPU share."""

import os

import pytest


@pytest.fixture
def gpu_environment():
    """Of a process that sees the GPUs, which other tests hide."""
    environment = dict(os.environ)
    hidden = environment.pop("DSCHAT_LORA_GPUS")
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        del environment[name]
    return environment if hidden == "all" else environment | {"CUDA_VISIBLE_DEVICES": hidden}
