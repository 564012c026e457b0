"""LoRA RLHF on DeepSpeed: supervised fine-tuning, reward model or DPO, PPO."""

__version__ = "0.2.0"
