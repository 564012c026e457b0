"""An adapter trained, saved and loaded again, by the package and by PEFT."""

import importlib.util
import tempfile
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.bundled import Bundled, bundled_engine
from benchmarks.common.report import PartReport, print_table
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device
from dschat_lora.lora.model import adapters_disabled
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.source import find_model
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

STEPS = 5
DTYPE = "bf16"
# PEFT adds the same products in another order: fp32 roundings of logits around 10.
PEFT_LIMIT = 1e-3


def run(report: PartReport, *, tiny: bool) -> None:
    """Compare the logits of the trained model, of a reloaded one, and of PEFT's."""
    bundled = Bundled(tiny=tiny)
    adapted, engine = bundled_engine(bundled, dtype=DTYPE, zero_stage=2)
    for _ in train_steps(engine, bundled.windows(STEPS), SUPERVISED, repeat(1.0)):
        pass
    tokens = torch.from_numpy(bundled.samples[0].input_ids).long()[None].to(device())
    trained = _logits(adapted.model, tokens)
    with adapters_disabled(adapted.model):
        moved = _distance(trained, _logits(adapted.model, tokens))
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "adapter"
        _save(directory, bundled, adapted)
        again = _logits(_reloaded(bundled, directory, DTYPE), tokens)
        fields = {"training_moved": moved, f"package_{DTYPE}": _distance(trained, again)}
        if importlib.util.find_spec("peft") is not None:
            exact = _logits(_reloaded(bundled, directory, "fp32"), tokens)
            fields["peft_fp32"] = _distance(exact, _logits(_by_peft(bundled, directory), tokens))
    report.store({"largest_logit_difference": fields, "steps": STEPS})
    print_table(["largest logit difference", ""], [list(item) for item in fields.items()])
    report.check("training moved the logits", moved > 0)
    report.check("the package reloads to the same logits", fields[f"package_{DTYPE}"] == 0)
    if "peft_fp32" in fields:
        report.check(f"PEFT agrees within {PEFT_LIMIT}", fields["peft_fp32"] <= PEFT_LIMIT)


def _save(directory: Path, bundled: Bundled, adapted: AdaptedModel) -> None:
    save_adapter(
        directory,
        adapted.model,
        adapted.lora,
        base=bundled.source.base,
        tokenizer=bundled.tokenizer,
        card={"data": {}, "metrics": {}, "versions": {}},
    )


def _reloaded(bundled: Bundled, directory: Path, dtype: str) -> Any:
    return bundled.build(dtype, find_model(str(directory))).model.to(device())


def _by_peft(bundled: Bundled, directory: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(bundled.source.base, dtype=DTYPES["fp32"])
    return PeftModel.from_pretrained(base, directory).to(device())


@torch.no_grad()
def _logits(model: Any, tokens: Tensor) -> Tensor:
    """(1, T, V) fp32."""
    model.eval()
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
