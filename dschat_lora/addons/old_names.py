"""Names that the add-ons' modules had; :mod:`dschat_lora.old_names` reads them."""

from pathlib import Path
from pkgutil import iter_modules

# Packages whose modules have kept their own names, and where they are.
_PACKAGES = {
    "endpoint": "addons.serving.endpoint",
    "experiments.glue": "addons.glue",
    "experiments.nlg": "addons.nlg",
    "serving": "addons.serving",
    "tinker": "addons.tinker",
}
_LIBRARIES = " ".join(
    f"addons.environments.{name}" for name in ("gymnasium", "mcp", "openenv", "reasoning_gym")
)
_COMPLETIONS = "addons.engines.completions addons.engines.completion_pool"
_SERVERS = f"{_COMPLETIONS} addons.engines.checks addons.engines.server_engine"
OLD_NAMES = {
    "algos.kto": "addons.kto.loss",
    "algos.distillation": "addons.distill.divergence",
    "api.command_lines": "commands.train commands.verbs commands.stages "
    "addons.nlg.verbs addons.glue.verbs addons.planning.verbs addons.evaluation.verbs "
    "addons.report.verbs addons.inspect.verbs addons.audit.verbs addons.demo.demo",
    "api.demo": "addons.demo.demo",
    "api.demo_judge": "addons.demo.judge",
    "api.notebook": "addons.report.notebook",
    "api.losses": "addons.trainer.losses",
    "api.sequences": "addons.trainer.sequences",
    "api.trainer": "addons.trainer.trainer",
    "api.trainer_build": "addons.trainer.build",
    "api.trainer_sampling": "addons.trainer.sampling",
    "assets.calculator": "addons.environments.calculator",
    "checkpoint.gpt2_checkpoint": "addons.nlg.gpt2_checkpoint",
    "checkpoint.extract": "addons.loralib.extract",
    "checkpoint.lora_only": "addons.loralib.lora_only",
    "commands.seeds": "addons.loralib.seeds",
    "data.filtering": "addons.audit.filtering",
    "data.nlg": "addons.nlg.formats data.row_formats",
    "data.similar_rows": "addons.audit.similar_rows",
    "data.stream": "addons.streaming.stream addons.streaming.loader data.readers",
    "data.stream_loader": "addons.streaming.loader",
    "data.tar_rows": "addons.streaming.tar_rows",
    "data.unpaired_batch": "addons.kto.batch",
    "generation.search": "generation.greedy addons.nlg.beam_search",
    "lora.deepspeed_chat": "addons.loralib.deepspeed_chat",
    "lora.loralib": "addons.loralib.loralib addons.loralib",
    "lora.loralib.layers": "addons.loralib.layers",
    "lora.loralib.utils": "addons.loralib.utils",
    "lora.mixed": "addons.serving.mixed",
    "lora.shared": "addons.tinker.shared",
    "models.dequantize": "addons.bases.codes",
    "models.families": "addons.planning.families",
    "models.other_base": "addons.bases.distance models.build runtime.merge",
    "models.published": "addons.planning.published addons.pipeline.placeholders",
    "pipeline.doctor": "addons.planning.doctor",
    "pipeline.judge": "addons.demo.judge",
    "pipeline.known_models": "addons.planning.known_models",
    "pipeline.plan": "addons.planning.plan",
    "pipeline.plan_report": "addons.planning.plan_report",
    "pipeline.plan_search": "addons.planning.plan_search",
    "pipeline.recipe": "addons.pipeline.recipe",
    "pipeline.run": "addons.pipeline.run",
    "pipeline.stages": "commands.stages addons.pipeline.placeholders addons.planning.published "
    "addons.planning.verbs",
    "pipeline.tune": "addons.planning.tune",
    "pipeline.verbs": "commands.verbs config.verbs addons.pipeline.verbs addons.planning.verbs "
    "addons.evaluation.verbs addons.report.verbs addons.inspect.verbs addons.audit.verbs "
    "addons.publish.verbs addons.loralib.verbs",
    **{
        f"report.{name}": f"addons.report.{name}"
        for name in ("curves", "html", "run_data", "sections", "verdict")
    },
    "report.markup": "report.texts addons.report.markup addons.audit.findings",
    "report.rollouts": "report.rollout_file addons.report.rollouts",
    "report.trackers": "addons.trackers.trackers",
    "rl.agent_programs": "addons.agents.agent_programs addons.agents.conversations "
    "addons.agents.agents",
    "rl.config": "rl.options.config rl.options.names addons.distill.stage",
    "rl.learn.served_teacher": "addons.distill.served_teacher",
    "rl.learn.teacher": "addons.distill.teacher",
    "rl.role_config": "rl.options.role_config addons.distill.config",
    "rl.served_teacher": "addons.distill.served_teacher",
    "rl.teacher": "addons.distill.teacher",
    "rl.agent_server": "addons.agents.agents",
    "rl.builtin_rewards": "addons.rewards.builtin rl.options.names",
    "rl.external_rewards": "addons.rewards.external",
    "rl.metrics": "rl.watch.metrics rl.loop.parts addons.diagnostics.diagnostics",
    "rl.rewards": "rl.score.user_functions rl.response.errors rl.response.response rl.score.scores "
    "addons.rewards.conventions",
    "rl.score.builtin_rewards": "addons.rewards.builtin rl.options.names",
    "rl.score.external_rewards": "addons.rewards.external",
    "rl.watch.diagnostics": "addons.diagnostics.diagnostics rl.watch.metrics",
    "rl.agents": "addons.agents.agents addons.agents.conversations",
    "rl.conversations": "addons.agents.conversations",
    "rl.draw.completions": _COMPLETIONS,
    "rl.environment": "addons.environments.environment addons.environments.turn_tokens "
    "addons.environments.players",
    "rl.environment_adapters": _LIBRARIES,
    "rl.draw.engine_checks": "addons.engines.checks",
    "rl.draw.rollout_engines": "addons.engines.server_engine rl.draw.engine",
    "rl.draw.rollout_servers": _SERVERS,
    "rl.draw.rollouts_ahead": "addons.engines.rollouts_ahead",
    "rl.draw.server_engine": "addons.engines.server_engine",
    "rl.draw.vllm_server": "addons.engines.vllm_server",
    "rl.play.agent_programs": "addons.agents.agent_programs",
    "rl.play.agent_server": "addons.agents.agents",
    "rl.play.agents": "addons.agents.agents",
    "rl.play.conversations": "addons.agents.conversations",
    "runtime.data_audit": "addons.audit.findings data.audit",
    "runtime.describe": "addons.inspect.describe",
    "rl.play.environment": "addons.environments.environment addons.environments.stateful",
    "rl.play.environment_adapters": _LIBRARIES,
    "rl.play.mcp_tools": "addons.environments.mcp",
    "rl.play.players": "addons.environments.players",
    "rl.play.stateful_environment": "addons.environments.stateful",
    "rl.play.turn_tokens": "addons.environments.turn_tokens",
    "rl.play.verifiers_environment": "addons.environments.verifiers",
    "rl.response.turn_tokens": "addons.environments.turn_tokens",
    "rl.stateful_environment": "addons.environments.stateful addons.environments.players",
    "rl.verifiers_environment": "addons.environments.verifiers",
    "rl.draw.prompt_stream": "addons.streaming.prompts",
    "rl.prompt_stream": "addons.streaming.prompts rl.draw.source",
    "runtime.shared_stream": "addons.streaming.runs",
    "runtime.streaming": "addons.streaming.hub addons.streaming.runs",
    "rl.rollout_engines": "addons.engines.server_engine rl.draw.engine",
    "rl.rollout_servers": _SERVERS,
    "rl.rollouts_ahead": "addons.engines.rollouts_ahead",
    "rl.vllm_server": "addons.engines.vllm_server",
    "runtime.seeds": "addons.loralib.seeds",
    "runtime.sharing": "addons.publish.sharing",
    "supervised.best_of_n": "addons.evaluation.best_of_n",
    "supervised.harness": "addons.evaluation.harness",
    "supervised.kto": "addons.kto.objective",
    "supervised.measure": "addons.evaluation.measure",
    "supervised.score": "addons.evaluation.score supervised.scorer supervised.inference",
    **{
        f"{old}.{module.name}": f"{new}.{module.name}"
        for old, new in _PACKAGES.items()
        for module in iter_modules([str(Path(__file__).parents[1].joinpath(*new.split(".")))])
    },
    "tinker.adapters": "addons.tinker.adapters addons.tinker.bases",
    "tinker.server": "addons.tinker.server addons.tinker.routes",
    "tinker.service": "addons.tinker.service addons.tinker.requests addons.tinker.registry",
}
