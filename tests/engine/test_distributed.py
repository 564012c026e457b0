"""What is set where a process chooses its device."""

import pytest
import torch

from dschat_lora.engine.distributed import choose_attention_kernels


@pytest.mark.parametrize(
    ("value", "enabled"), [(None, False), ("1", False), ("0", True)], ids="{}".format
)
def test_cudnns_attention_is_taken_where_torchs_variable_asks_for_it(value, enabled, monkeypatch):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", value)
    try:
        torch.backends.cuda.enable_cudnn_sdp(not enabled)
        choose_attention_kernels()
        assert torch.backends.cuda.cudnn_sdp_enabled() is enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
