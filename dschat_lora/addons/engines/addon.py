"""Rollout engines beside the run's own: servers, vLLM, and rollouts ahead."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.engines.options:EngineOptions"
_SERVERS = "dschat_lora.addons.engines.facts:servers"
ADDON = Addon(
    "engines",
    options={"rlhf": _OPTIONS, "distill": _OPTIONS},
    provides={
        "rollout_engine": {
            "vllm": "dschat_lora.addons.engines.facts:VLLM",
            "http:": _SERVERS,
            "https:": _SERVERS,
        },
    },
    writes=("vllm",),
)
