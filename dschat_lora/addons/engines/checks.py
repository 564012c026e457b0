"""Options that rollout engines refuse, before torch is loaded."""

from dschat_lora.addons.engines.completions import CONNECT_SECONDS, CompletionServer, ServerError
from dschat_lora.addons.engines.facts import server_addresses
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import EngineError
from dschat_lora.runtime.checks import check_command
from dschat_lora.runtime.resume import is_first_rank
from dschat_lora.runtime.validation import Inputs

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def check_servers(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse servers that do not answer, or have no room for prompt and response."""
    for address in server_addresses(config.batch.rollout_engine) if is_first_rank() else ():
        try:
            limit = CompletionServer(address, CONNECT_SECONDS).base_limit()
        except (ServerError, EngineError) as error:
            raise ValueError(
                f"--rollout_engine {address} cannot be reached: {error}; start `vllm serve BASE "
                "--enable-lora` there with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or `dschat-lora "
                "serve BASE --allow_runtime_lora_updating`"
            ) from error
        if limit is not None and limit < config.data.max_seq_len:
            raise ValueError(
                f"--rollout_engine {address} has a context of {limit} tokens, but "
                "--max_prompt_seq_len and --max_answer_seq_len add up to "
                f"{config.data.max_seq_len}"
            )


def check_vllm(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse a command of vLLM that is not there, and an adapter or base that it cannot serve."""
    given = config.addons.engines.vllm_command
    command = "vllm serve" if given is None else given
    remedy = ": install vLLM in its own environment, and give the path of its program"
    check_command("vllm_command", command, remedy)
    vllm_rank(max(config.actor.lora_dim, config.actor.expert_lora_dim or 0))
    rope = inputs.sources.by_role["actor"].rope_scaling
    if rope is not None and "hf-overrides" not in command:
        raise ValueError(
            "--rollout_engine vllm serves the base as configured in its files, but the actor was "
            f"trained with --rope_scaling {rope}: pass it to vLLM with --hf-overrides in "
            "--vllm_command, or merge the adapter first"
        )


def vllm_rank(rank: int) -> int:
    """The value of vLLM's ``--max-lora-rank`` for adapters of a rank.

    Raises:
        ValueError: if vLLM takes none of that rank.
    """
    fitting = [each for each in VLLM_RANKS if each >= rank]
    if not fitting:
        raise ValueError(
            f"--actor_lora_dim {rank} exceeds vLLM's maximum of {VLLM_RANKS[-1]}: lower it, or "
            "use another --rollout_engine"
        )
    return fitting[0]
