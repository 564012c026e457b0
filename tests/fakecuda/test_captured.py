"""Models of many types: a step is captured, or known not to be before a capture is begun."""

import re

import pytest

from helpers.spread import ALL

pytestmark = pytest.mark.stage

TYPES = (
    *("apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "diffllama"),
    *("dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma2", "gemma3_text", "glm4", "glm4_moe"),
    *("gpt_bigcode", "gpt_oss", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "lfm2", "llama", "minimax", "ministral", "mixtral", "mpt", "nemotron"),
    *("nemotron_h", "olmoe", "phi", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "seed_oss"),
    *("smollm3", "stablelm", "starcoder2", "zamba2"),
)
WAITS = "decoding without CUDA graphs, more slowly: the model synchronizes with the GPU at "
WAITS += r"(modeling_\w+|moe)\.py:\d+"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TYPES if ALL else ("glm4_moe", "phimoe"))
@pytest.mark.parametrize(
    ("card", "dtype"), [("h200", "bfloat16"), ("t4", "float16")] if ALL else [("h200", "bfloat16")]
)
def test_no_capture_fails(fake_device, kind, card, dtype):
    noted = fake_device.run("fakecuda.captured:decode", kind=kind, card=card, dtype=dtype)
    assert not noted["left"]
    if noted["replays"]:
        # Six steps follow the prompts, of which the first is none.
        assert (noted["begun"], noted["replays"], noted["said"]) == (1, 5, [])
    else:
        assert noted["begun"] == 0
        assert len(noted["said"]) == noted["takes_cache"]
        assert all(re.fullmatch(WAITS, text) for text in noted["said"])
    assert bool(noted["replays"]) == (kind == "glm4_moe") or ALL
