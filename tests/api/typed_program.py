"""A program as a user types it, for ``mypy --strict``: right lines pass, wrong ones are found.

An error that is ignored here and is none is an error of its own (``warn_unused_ignores``).
"""

import dschat_lora as dl

rows = [{"prompt": "What is 2 plus 3?", "completion": " 5."}]


def is_right(responses: list[str]) -> list[float]:
    return [float("5" in text) for text in responses]


def show(event: str, step: int, metrics: dict[str, object]) -> str | None:
    return "stop" if step > 3 else None


sft = dl.sft("a/name", data=rows, lora_dim=16, callbacks=[show], deepspeed_config={"a": 1})
better = dl.rlhf(sft, data="prompts.jsonl", algorithm="grpo", rewards=[is_right])
texts: list[str] = better.generate(["What is 2 plus 3?"], max_new_tokens=8)
loss: float = dl.evaluate(better, rows)["loss"]
known: tuple[int, bool | None] = dl.plan("sft", device="24GB").peak, dl.plan("dpo").fits
counts: dict[str, object] = dl.audit(rows, show=1).counts
status: str = dl.load(dl.merge(better)).status
with dl.Trainer(sft, lora_dim=16, seed=1234) as trainer:
    mean: float = trainer.forward_backward([{"tokens": [1, 2], "weights": [0.0, 1.0]}])
    words: list[str] = [each.text for each in trainer.sample(["a"], num_samples=2)[0]]

dl.sft(lora_dimm=16)  # type: ignore[call-arg]
dl.sft(lora_dim="16")  # type: ignore[arg-type]
dl.rlhf(kl_in="rewards")  # type: ignore[arg-type]
dl.generate(sft, ["a"], max_tokens=3)  # type: ignore[call-arg]
dl.Trainer(lora_dimm=16)  # type: ignore[call-arg]
