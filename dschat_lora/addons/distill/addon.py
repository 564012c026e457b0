"""On-policy distillation: a student's responses scored by a teacher."""

from dschat_lora.config.addons import Addon

_HERE = "dschat_lora.addons.distill"
_OPTIONS = f"{_HERE}.options:TeacherOptions"
STAGE = {
    "options": "addons.distill.stage:DistillConfig",
    "checks": "rl.loop.validation:check_rlhf",
    "program": "rl.loop.train:run_rlhf",
    "examples": """examples:
  dschat-lora distill --model_name_or_path output/sft \\
    --teacher_model_name_or_path output/rlhf --data_path prompts.jsonl
  dschat-lora distill --model_name_or_path Qwen/Qwen3-0.6B --data_path q.jsonl \\
    --teacher_model_name_or_path Qwen/Qwen3-8B --teacher_bits 4""",
    "inputs": {
        "actor_model_name_or_path": ("sft", "dpo"),
        "teacher_model_name_or_path": ("rlhf",),
    },
}
ADDON = Addon(
    "distill",
    verbs={"distill": f"{_HERE}.verbs:distill"},
    summaries={"distill": "On-policy distillation: a student's responses scored by a teacher"},
    titles={"distill": "Distillation"},
    functions={"distill": f"{_HERE}.python:distill"},
    options={"rlhf": _OPTIONS, "distill": _OPTIONS},
    provides={
        "algorithm": {"distill": f"{_HERE}.algorithm:DISTILL"},
        "reference": {"teacher": _OPTIONS},
        "stage": {"distill": f"{_HERE}.addon:STAGE"},
    },
)
