"""Options of agents, and what step 3 asks of them: checks without torch, and a player."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dschat_lora.addons.agents.addon import ADDON, TIMED_OUT
from dschat_lora.config.addons import check_needs
from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option
from dschat_lora.rl.options.names import check_name
from dschat_lora.runtime.checks import check_command, check_function, require_packages

if TYPE_CHECKING:
    from dschat_lora.models.loading import Tokenizer
    from dschat_lora.rl.draw.player import Player
    from dschat_lora.rl.options.config import RlhfConfig
    from dschat_lora.rl.response.response import Response

of_agents = partial(option, when="agent or agent_command")


@dataclass(frozen=True)
class AgentOptions:
    """A program that plays the episodes of step 3."""

    agent: str | None = option(
        None,
        help="module:function that runs an episode: it receives the row and an openai client "
        "connected to the actor, may call it any number of times, and returns the reward",
        runs="object",
    )
    agent_command: str | None = option(
        None,
        help="command that runs an episode: it reads the row from standard input, reaches the "
        "actor at OPENAI_BASE_URL, and prints the reward on its last line",
        runs="code",
    )
    agent_timeout: float = of_agents(
        600.0,
        help="time limit of an agent's episode in seconds, not counting the time the actor takes "
        "to answer",
    )
    agent_retries: int = of_agents(0, help="number of retries of an agent's episode that failed")
    agent_max_calls: int = of_agents(
        100, help="maximum number of actor responses in an agent's episode"
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "agent_max_calls")
        require_numbers(self, ">= 0", "agent_retries")
        if self.agent is not None:
            check_name("agent", self.agent)
        require_numbers(self, "> 0", "agent_timeout")

    @property
    def plays(self) -> list[str]:
        """The options by which a program plays the episodes; empty where none does."""
        return [n for n in ("agent", "agent_command") if getattr(self, n) is not None]

    def described(self) -> str:
        """The program, as a run says what its rewards come from."""
        return f"the agent {self.agent or self.agent_command}"

    def check_player(self, config: "RlhfConfig") -> None:
        """Refuse a program that is not there, and options that no agent goes with.

        Raises:
            ValueError: naming the option.
        """
        check_needs(ADDON, f"--{self.plays[0]}")
        if self.agent is not None:
            require_packages("--agent", "starlette", "uvicorn", "openai>=2", extra="agents")
            check_function("agent", self.agent)
        elif self.agent_command is not None:
            require_packages("--agent_command", "starlette", "uvicorn", extra="agents")
            check_command("agent_command", self.agent_command)
        if (own := config.reference) is not None and own.own_prompts:
            raise ValueError(
                f"{own.own_prompts} is read before a row's prompt, and an agent makes prompts of "
                f"its own: give the {own.role} by --{own.role}_model_name_or_path"
            )
        if tokens := config.rewards.soft_overlong_tokens:
            raise ValueError(
                f"--soft_overlong_tokens {tokens} applies to single answers, but an agent's "
                "episode has several: let the agent return a lower reward instead"
            )

    def check(self, config: "RlhfConfig") -> "RlhfConfig":
        """The config without the punishment of long answers, which is of single ones."""
        if not self.plays:
            return config
        return replace(config, rewards=replace(config.rewards, soft_overlong_tokens=0))

    def response_metrics(
        self, responses: "Sequence[Response]", counted: "Sequence[Response]"
    ) -> dict[str, float]:
        """Sequences of episodes, and how many failed; nothing without agents."""
        episodes = [each.episode for each in responses]
        if not any(each.num_calls or each.failure for each in episodes):
            return {}
        played = [len(each.sequences) for each in responses if not each.episode.failure]
        return {
            "sequences": sum(played) / max(1, len(played)),
            "failed_episodes": sum(bool(each.failure) for each in episodes),
            "timed_out_episodes": sum(each.failure.startswith(TIMED_OUT) for each in episodes),
            "retried_episodes": sum(each.num_retries > 0 for each in episodes),
        }

    def player(self, config: "RlhfConfig", tokenizer: "Tokenizer", closing: ExitStack) -> "Player":
        """The agents of ``--agent`` or ``--agent_command``; ``closing`` ends their server.

        Raises:
            ValueError: if there is no such function.
        """
        # which have a server's libraries
        from dschat_lora.addons.agents.agent_programs import AgentCommand, AgentFunction
        from dschat_lora.addons.agents.agents import AgentLimits, Agents
        from dschat_lora.addons.agents.conversations import PromptTokens
        from dschat_lora.addons.environments.turn_tokens import TurnTokens
        from dschat_lora.data.chat import make_chat
        from dschat_lora.data.encoder import make_encoder
        from dschat_lora.generation.stops import end_of_text
        from dschat_lora.rl.score.user_functions import find_object

        batch, data = config.batch, config.data
        turn_tokens = TurnTokens(make_chat(tokenizer, data.data.chat_template_kwargs), tokenizer)
        program: AgentCommand | AgentFunction
        if self.agent is None:
            program = AgentCommand(str(self.agent_command), bool(config.rewards.reward_function))
        else:
            program = AgentFunction(self.agent, find_object("agent", self.agent))
        seconds, retries, calls = self.agent_timeout, self.agent_retries, self.agent_max_calls
        agents = Agents(
            program,
            PromptTokens(make_encoder(tokenizer), turn_tokens, data.max_seq_len),
            AgentLimits(seconds, retries, calls, calls_at_a_time=batch.rows_decoded),
            max_new_tokens=data.max_answer_seq_len,
            end_of_text=lambda stop, tokens: end_of_text(
                tokens, (*batch.stop_strings, *stop), tokenizer.decode
            ),
        )
        closing.callback(agents.close)
        return agents
