"""Options of agents: which are refused or have no effect, and what a run makes of them."""

import pytest

from dschat_lora.addons.agents.options import AgentOptions
from dschat_lora.config import addons
from dschat_lora.config.options import parse_config
from dschat_lora.config.when import without_effect
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.resume import options_with_code
from helpers.addons import of_addon

pytest.importorskip("uvicorn", reason="the extra [agents] is not installed")
pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("first_rows")]

AGENT = "--agent helpers.rlhf_course:asks_on"


def parsed(line, config_class=RlhfConfig):
    return parse_config(config_class, line.split())


def test_the_add_on_that_serves_the_actor_is_named_where_it_is_not_there(monkeypatch):
    there = {name: each for name, each in addons.installed().items() if name != "serving"}
    monkeypatch.setattr(addons, "installed", lambda: there)
    for line in (AGENT, "--agent_command true"):
        name = line.split()[0]
        with pytest.raises(ValueError, match=f"^{name} needs the add-on serving, which is not in"):
            check_rlhf(parsed(line))


def test_options_of_agents_have_no_effect_without_one():
    config = parsed("--agent_retries 1 --agent_max_calls 5")
    why = "has no effect without --agent or --agent_command"
    assert without_effect(config) == [f"--agent_retries {why}", f"--agent_max_calls {why}"]
    assert not without_effect(parsed(f"{AGENT} --agent_retries 1"))


@pytest.mark.parametrize("config_class", [RlhfConfig, *of_addon("distill.stage:DistillConfig")])
def test_a_checkpoint_chooses_no_program(config_class):
    options = {"agent": "a:b", "agent_command": "c", "agent_retries": 1}
    assert options_with_code(config_class, options) == {"agent": "a:b", "agent_command": "c"}


def test_an_agent_needs_no_reward_and_punishes_no_long_answers(capsys):
    config = check_rlhf(parsed(f"{AGENT} --algorithm dapo --num_prompts 8"))
    assert config.addons.agents == AgentOptions(agent="helpers.rlhf_course:asks_on")
    assert config.rewards.soft_overlong_tokens == 0
    assert config.players
    said = capsys.readouterr().out
    assert "reward: the agent helpers.rlhf_course:asks_on; data: 8 episodes without data" in said
