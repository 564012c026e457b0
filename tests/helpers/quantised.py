"""Tiny models whose files hold FP8, MXFP4, GPTQ or AWQ, written by each format's definition.

Each writer returns the values that its files stand for, by the names of the model.
"""

import ctypes
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from helpers.tiny import SHAPE

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*MXFP4_VALUES, *(-value for value in MXFP4_VALUES))
GROUP = 16  # inputs of a scale


def rewrite(source, directory, quantise, field, *, part=""):
    """Files of ``source`` with linear layers of the blocks as ``quantise`` stores them.

    They are those with ``part`` in their names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(source) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": field}))
    stored, values = {}, {}
    for name, weight in load_file(Path(source) / "model.safetensors").items():
        if weight.dim() == 2 and name.endswith("proj.weight") and part in name:
            parts, values[name] = quantise(weight.float())
            stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        else:
            stored[name] = values[name] = weight
    tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return values


def fp8(weight):
    """Blocks of 16 x 16 with a scale each, as DeepSeek-V3 has them of 128 x 128."""
    out, inputs = weight.shape
    blocks = weight.reshape(out // 16, 16, inputs // 16, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = codes.float() * scales[:, None, :, None]
    parts = {"weight": codes.reshape(out, inputs), "weight_scale_inv": scales}
    return parts, values.reshape(out, inputs)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}


def _grouped_codes(weight):
    """Codes 0 to 15, zeros and scales of groups of inputs, and the values that they mean."""
    out, inputs = weight.shape
    groups = weight.t().reshape(inputs // GROUP, GROUP, out)
    low, high = groups.amin(1), groups.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    values = scales.float()[:, None] * (codes - zeros[:, None])
    return codes.reshape(inputs, out).int(), zeros.int(), scales, values.reshape(inputs, out).t()


def _int32(value):
    """The signed integer of 32 bits."""
    return value - 2**32 if value >= 2**31 else value


def gptq(weight):
    """GPTQ of 4 bits: eight inputs an int32; zeros are stored less one. Groups are shuffled."""
    codes, zeros, scales, _ = _grouped_codes(weight)
    inputs, out = codes.shape
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
    groups = (torch.arange(inputs) // GROUP)[order].int()
    codes = codes[order]
    qweight = [
        [_int32(sum(int(codes[8 * i + k, o]) << 4 * k for k in range(8))) for o in range(out)]
        for i in range(inputs // 8)
    ]
    qzeros = [
        [
            _int32(sum((int(row[8 * j + k]) - 1) % 16 << 4 * k for k in range(8)))
            for j in range(out // 8)
        ]
        for row in zeros
    ]
    values = torch.stack(
        [scales[g].float() * (codes[i] - zeros[g]) for i, g in enumerate(groups.tolist())], 1
    )
    parts = {
        "qweight": torch.tensor(qweight, dtype=torch.int32),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": scales,
        "g_idx": groups,
    }
    return parts, values


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}


def awq(weight):
    """AWQ: an int32 holds eight outputs, from the lowest bits in the order below."""
    codes, zeros, scales, values = _grouped_codes(weight)

    def packed(rows):
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return torch.tensor(
            [
                [
                    _int32(sum(int(row[8 * j + o]) << 4 * k for k, o in enumerate(order)))
                    for j in range(len(row) // 8)
                ]
                for row in rows
            ],
            dtype=torch.int32,
        )

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, values


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def save_gpt_oss(directory):
    """A tiny gpt-oss with experts in MXFP4; the values of those, (E, in, out)."""
    config = GptOssConfig(
        **SHAPE | {"hidden_size": 64, "intermediate_size": 32},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    stored, values = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name] = weight
            continue
        experts, inputs, out = weight.shape
        blocks = torch.randint(0, 256, (experts, out, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, out, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        table = torch.tensor(MXFP4_VALUES)
        pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1)
        scaled = pairs.flatten(3) * torch.exp2(scales.float() - 127)[..., None]
        values[name] = scaled.flatten(2).transpose(1, 2)
    model.config.save_pretrained(directory)
    file = Path(directory) / "config.json"
    field = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": field}))
    tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
    return values


def mend_bitsandbytes(monkeypatch):
    """Have bitsandbytes compute what it computes on a CPU without AVX-512.

    With it, version 0.50 gets rows wrong that hold a multiple of 16 values and not of 64, and
    computes in bf16 where a model does not train.
    """
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.nn import Linear4bit

    plain = ops.lib.cdequantize_blockwise_cpu_nf4_fp32

    def by_blocks(codes, absmax, out, block, rows, columns):
        count, size = rows.value * columns.value, block.value
        shape = (count // size, size) if count % size == 0 else (1, count)
        return plain(codes, absmax, out, block, *map(ctypes.c_longlong, shape))

    monkeypatch.setattr(ops.lib, plain.__name__, by_blocks, raising=False)
    made = Linear4bit.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.support_avx512bf16_for_cpu = False

    monkeypatch.setattr(Linear4bit, "__init__", init)
