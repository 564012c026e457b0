"""Adapters of an actor and of a reward model as stock PEFT writes them, and the roles on them."""

from dataclasses import replace
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.source import find_model
from dschat_lora.rl.learn.engines import Engines, Network, policies_of
from dschat_lora.rl.learn.roles import build_roles
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.validation import Sources
from helpers.tiny import VOCAB

# Every linear layer of a block, as each architecture calls them.
LAYERS = {
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


class Words:
    """As much of a tokenizer as building models and collating asks for."""

    eos_token_id = 2
    pad_token_id = 0

    def __len__(self):
        return VOCAB

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i < 3))


def config_of(**roles):
    """Options of step 3; ``actor``, ``critic``, ``ppo``... are dicts of what differs."""
    config = RlhfConfig()
    changed = {name: replace(getattr(config, name), **values) for name, values in roles.items()}
    return replace(config, **changed)


def save_adapters(kind, base, directory, *, rank=3):
    """(actor, reward): directories of two unlike adapters on one base, all values random."""
    return (
        _save(AutoModelForCausalLM, "CAUSAL_LM", kind, base, Path(directory) / "sft", rank, 1),
        _save(
            *(AutoModelForSequenceClassification, "SEQ_CLS", kind, base),
            *(Path(directory) / "reward", rank + 1, 2),
        ),
    )


def _save(auto, task, kind, base, directory, rank, seed):
    if not directory.exists():
        options = {"num_labels": 1} if task == "SEQ_CLS" else {}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = peft.get_peft_model(
                auto.from_pretrained(base, **options),
                peft.LoraConfig(
                    r=rank,
                    lora_alpha=7,
                    target_modules=LAYERS[kind],
                    fan_in_fan_out=kind == "gpt2",
                    modules_to_save=["score"] if task == "SEQ_CLS" else None,
                    task_type=task,
                ),
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn(parameter.shape))
        model.save_pretrained(directory)
    return str(directory)


def roles_of(config, actor, critic, *, dtype=torch.float32, meta=False):
    """The roles on what ``actor`` and ``critic`` name."""
    named = {"actor": actor} | ({} if critic is None else {"critic": critic})
    sources = Sources({role: find_model(name) for role, name in named.items()})
    return build_roles(config, sources, Words(), dtype=dtype, meta=meta)


def networks_of(roles, *, entropy_trains=False):
    """(actor's, critic's) networks as a run has them; None without a critic."""
    own = policies_of(roles.actor.model, roles.reference.model, entropy_trains=entropy_trains)
    scorers = {}
    if roles.critic is not None:
        scorers["critic"] = RewardModel(roles.critic.model)
    if roles.reward is not None:
        scorers["reward"] = RewardModel(roles.reward.model)
    if roles.critic is None:
        return Network(**own, **scorers), None
    return Network(**own), Network(**scorers)


def asked_of(roles, *, temperature=1.0):
    """The roles without engines around them, to be asked and no more."""
    actor, critic = networks_of(roles)
    scorer = None if roles.reward is None else critic or actor
    return Engines(actor, critic, scorer, temperature)
