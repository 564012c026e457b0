"""Estimates the memory that each stage of a pipeline's YAML file takes on one GPU.

python scripts/recipe_memory.py configs/recipes/*.yaml

Models are built on the meta device from the shapes below: nothing is downloaded or allocated.
The recipes state these numbers in a comment, which tests compare with the estimate.
"""

import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, OPTConfig, PretrainedConfig
from transformers.utils import logging

from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.stages import RewardStageConfig, SupervisedConfig
from dschat_lora.engine.build import EngineSettings, resolve_dtype
from dschat_lora.models.build import AdaptedModel, build_causal_lm, build_reward_model
from dschat_lora.models.causal_lm import load_causal_lm, load_config
from dschat_lora.models.reward_model import load_reward_model
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.views import share_parameters
from dschat_lora.pipeline.recipe import Recipe, read_recipe
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.pipeline.validation import check_stages
from dschat_lora.rlhf.config import RlhfConfig
from dschat_lora.rlhf.memory import memory_plan
from dschat_lora.rlhf.role_config import RoleConfig
from dschat_lora.rlhf.roles import Roles, frozen
from dschat_lora.runtime.memory import estimate_memory_of

GIB = 2**30
STATED = re.compile(r"^#\s+(\w+)\s+([\d.]+) GiB", re.MULTILINE)


def _opt(hidden_size: int, layers: int, heads: int, **others: Any) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden_size,
        ffn_dim=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **{"word_embed_proj_dim": hidden_size, **others},
    )


def shapes() -> dict[str, PretrainedConfig]:
    """The models that recipes name, as published."""
    return {
        "facebook/opt-350m": _opt(
            1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False
        ),
        "facebook/opt-1.3b": _opt(2048, 24, 32),
        "facebook/opt-6.7b": _opt(4096, 32, 32),
        "meta-llama/Llama-2-7b-hf": LlamaConfig(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            vocab_size=32000,
            max_position_embeddings=4096,
        ),
    }


class NoTokenizer:
    """Stands where a vocabulary is looked at."""

    pad_token_id, eos_token_id = 1, 2

    def __len__(self) -> int:
        return 0


def estimates(path: str | Path) -> dict[str, int]:
    """Bytes of each stage of the recipe at ``path``, by its name."""
    recipe = read_recipe(str(path))
    with tempfile.TemporaryDirectory() as temporary:
        names = {name for options in recipe.stages.values() for name in map(str, options.values())}
        homes = {name: Path(temporary) / name for name in shapes().keys() & names}
        for name, home in homes.items():
            shapes()[name].save_pretrained(home)
        recipe = _with_models(recipe, homes)
        return {
            name: _rlhf(recipe, config) if isinstance(config, RlhfConfig) else _one(recipe, config)
            for name, config in check_stages(recipe).items()
        }


def stated(path: str | Path) -> dict[str, float]:
    """GiB of each stage as the recipe's comment says."""
    found = STATED.findall(Path(path).read_text(encoding="utf-8"))
    return {name: float(number) for name, number in found}


def _with_models(recipe: Recipe, homes: dict[str, Path]) -> Recipe:
    """The recipe with directories that hold a shape instead of names of the hub."""
    stages = {
        stage: {
            option: str(homes[value]) if isinstance(value, str) and value in homes else value
            for option, value in options.items()
        }
        for stage, options in recipe.stages.items()
    }
    return replace(recipe, stages=stages)


def _base(recipe: Recipe, stage: str, option: str = "model_name_or_path") -> ModelSource:
    """What a stage's model stands on, perhaps through the outputs of earlier stages."""
    earlier = recipe.sources(stage).get(option)
    if earlier is not None:
        return _base(recipe, earlier)
    return ModelSource(find_model(recipe.stages[stage].get(option)).base)


def _one(recipe: Recipe, config: SupervisedConfig) -> int:
    """A stage with one model."""
    scores = isinstance(config, RewardStageConfig)
    build: Any = build_reward_model if scores else build_causal_lm
    settings = _settings(config.model.dtype, config.parallel.zero_stage, config.parallel.offload)
    stage = next(name for name, each in _KINDS.items() if type(config) is each)
    adapted = build(
        _base(recipe, stage),
        NoTokenizer(),
        config.model,
        config.lora,
        dtype=settings.torch_dtype,
        seed=0,
        meta=True,
    )
    estimate = estimate_memory_of(adapted, config, settings)
    assert estimate is not None, f"the architecture of {stage} is not understood"
    return estimate


def _rlhf(recipe: Recipe, config: RlhfConfig) -> int:
    """Step 3: adapters in fp32 on frozen bases, the reference's and the reward model's too."""
    settings = _settings(config.load.dtype, config.parallel.zero_stage, config.parallel.offload)
    actor_base, critic_base = (
        _base(recipe, "rlhf", f"{role}_model_name_or_path") for role in ("actor", "critic")
    )
    dtype = settings.torch_dtype
    actor_config = config.actor.model(config.load)
    language = load_causal_lm(
        actor_base.base,
        load_config(actor_base.base, actor_config),
        actor_config,
        dtype=dtype,
        meta=True,
    )
    scored = language
    if critic_base != actor_base:
        critic_config = config.critic.model(config.load)
        scored = load_reward_model(
            critic_base.base,
            load_config(critic_base.base, critic_config),
            critic_config,
            dtype=dtype,
            seed=0,
            meta=True,
        )

    def role(build: Any, source: ModelSource, options: RoleConfig, base: Any) -> AdaptedModel:
        lora: LoraConfig = options.lora(True)
        assert lora.lora_dim > 0, "a recipe trains adapters"
        base.requires_grad_(False)
        return build(
            source,
            NoTokenizer(),
            options.model(config.load),
            lora,
            dtype=dtype,
            seed=0,
            meta=True,
            base=base,
        )

    actor = role(build_causal_lm, actor_base, config.actor, language)
    roles = Roles(
        actor,
        frozen(role(build_causal_lm, actor_base, config.actor, language)),
        role(build_reward_model, critic_base, config.critic, scored),
        frozen(role(build_reward_model, critic_base, config.critic, scored)),
        share_parameters(actor.model),
    )
    plan = memory_plan(config, roles, {"actor": settings, "critic": settings})
    assert plan is not None, "the architecture is not understood"
    return plan.peak


def _settings(dtype: str, zero_stage: int | None, offload: bool) -> EngineSettings:
    """What the estimate asks of an engine; the rest is no matter of memory."""
    return EngineSettings(
        dtype=resolve_dtype(dtype),
        zero_stage=zero_stage or 0,
        offload=offload,
        micro_batch_size=1,
        accumulation_steps=1,
        max_grad_norm=1.0,
        betas=(0.9, 0.95),
        epsilon=1e-8,
        deepspeed_json={},
    )


_KINDS = {name: stage.config for name, stage in STAGES.items()}


def main() -> None:
    """Print a line for each stage of each file."""
    logging.set_verbosity_error()
    for path in sys.argv[1:]:
        said = stated(path)
        for stage, size in estimates(path).items():
            beside = f"  (stated: {said[stage]})" if stage in said else ""
            print(f"{path}  {stage:8} {size / GIB:6.3g} GiB{beside}")


if __name__ == "__main__":
    main()
