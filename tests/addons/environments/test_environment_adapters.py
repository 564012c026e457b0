"""Environments of other libraries, each played with its own package."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from addons.environments.episodes import CHAT, END, TOKENIZER, call, failing, made, play, read
from dschat_lora.addons.environments.addon import LIBRARIES, episode_prompt
from dschat_lora.addons.environments.environment import EnvironmentFailedError
from dschat_lora.addons.environments.options import EnvironmentOptions
from dschat_lora.addons.environments.players import load_environment
from dschat_lora.rl.options.names import load_object
from dschat_lora.runtime import checks

pytestmark = pytest.mark.usefixtures("one_rank")
ENVS = "addons.environments.gym_envs"
HERE = Path(__file__).parent
NEEDED = {  # and the extra that has it
    "gymnasium": ("gymnasium", "gymnasium"),
    "mcp": ("mcp>=2", "mcp"),
    "openenv": ("openenv", "openenv"),
    "reasoning_gym": ("reasoning_gym", "environments"),
    "verifiers": ("verifiers>=0.4", "verifiers"),
}


def load(name):
    return load_environment(name, TOKENIZER, chat=CHAT, max_prompt_tokens=4000)


def episodes(*numbers):
    return [{"prompt": episode_prompt(n), "episode": n} for n in numbers]


def questions(prompts):
    return [json.loads(each.columns)["prompt"][-1]["content"] for each in prompts]


def rewards(found):
    return [each.episode.reward for each in found]


def check(name):
    EnvironmentOptions(environment=name).check_player(None)


def factory(name):
    return load_object("environment", name)


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch):
    check(f"{ENVS}:Guess")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    setup = (HERE.parents[2] / "setup.py").read_text(encoding="utf-8")
    assert {*LIBRARIES} == {*NEEDED}
    for library, (package, extra) in NEEDED.items():
        assert f'"{extra}": ' in setup
        words = f"--environment {library}:x needs {package}: pip install 'dschat_lora[{extra}]'"
        with pytest.raises(ValueError, match=re.escape(words)):
            check(f"{library}:x")


def test_a_task_of_reasoning_gym_asks_and_scores():
    gym = pytest.importorskip("reasoning_gym")
    environment = load("reasoning_gym:chain_sum")
    environment.check_columns({"prompt", "episode"})
    assert environment.label() == "chain_sum"
    entries = gym.create_dataset("chain_sum", size=2**31, seed=0)
    right, question = entries[5]["answer"], entries[5]["question"]
    prompts, played = play(environment, episodes(5, 5), [[right + END], ["none" + END]])
    assert questions(prompts)[0] == question
    assert rewards(played) == [1.0, 0.0]
    with pytest.raises(ValueError, match="--environment reasoning_gym:nosuch: .*not registered"):
        load("reasoning_gym:nosuch")


def wanted(episode):
    """What episode ``episode`` of ``Guess-v0`` hides."""
    from addons.environments.gym_envs import Guess

    hiding = Guess()
    hiding.reset(seed=episode)
    return hiding.wanted


def test_gymnasium_plays_text_until_terminated_or_truncated():
    pytest.importorskip("gymnasium")
    environment = load(f"gymnasium:{ENVS}:Guess-v0")
    assert environment.label() == "Guess-v0"
    right = [wanted(n) for n in range(4)]
    wrong = [str((int(each) + 1) % 10) for each in right]
    turns = [
        [right[0] + END],
        [wrong[1] + END, right[1] + END],
        [wrong[2] + END] * 3,
        ["ten" + END, f" {right[3]} " + END],
    ]
    prompts, played = play(environment, episodes(*range(4)), turns, copies=2)
    assert questions(prompts) == [f"Guess a number. Its half is {int(n) / 2}." for n in right]
    assert len(set(right)) > 1
    # Steps count, and an action that is none does not.
    assert rewards(played)[::2] == rewards(played)[1::2] == [1.0, 1.25, 0.75, 1.0]
    assert "wrong" in read(played[2])
    assert "Invalid action: it must be a text of Text(1, 1, charset=0123456789)." in read(played[6])
    assert "\n" not in re.search("Invalid.*", read(played[6]))[0].removesuffix("\n")


def test_discrete_actions_go_by_number_and_name():
    pytest.importorskip("gymnasium")
    environment = load(f"gymnasium:{ENVS}:Left-v0")
    turns = [["1" + END], ["0" + END], ["high" + END], ["Low" + END], ["2" + END, "HIGH" + END]]
    _, played = play(environment, episodes(*range(5)), turns)
    assert rewards(played) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert "Invalid action: it must be one of 0, 1, low, high." in read(played[4])


def test_what_gymnasium_cannot_play_is_refused():
    pytest.importorskip("gymnasium")
    for name, words in (
        (
            "addons.environments.gym_envs:Moves-v0",
            "Moves-v0: actions are Box.*; only Text and Discrete",
        ),
        ("Nosuch-v0", "--environment gymnasium:Nosuch-v0: .*doesn't exist"),
        ("nosuch:Nosuch-v0", "nosuch"),
    ):
        with pytest.raises(ValueError, match=words):
            load(f"gymnasium:{name}")
    with failing("an observation is a float; only environments with"):
        play(load(f"gymnasium:{ENVS}:Blind-v0"), episodes(1), [["1" + END]])


def test_gymnasium_is_closed_with_its_object():
    pytest.importorskip("gymnasium")
    from addons.environments.gym_envs import Guess

    before = Guess.closed
    outcome = factory(f"gymnasium:{ENVS}:Guess-v0")()
    assert Guess.closed == before
    del outcome
    assert Guess.closed == before + 1


GREET = {"name": "greet", "description": "", "parameters": {}}


class Listed:
    """Tools by their schemas, without methods."""

    tool_schemas = ({"type": "function", "function": GREET},)

    def reset(self):
        pass

    def call(self, name, arguments):
        if not arguments:
            raise ConnectionError("nobody is there")
        return f"{name}: {arguments['whom']}"

    def get_reward(self):
        return 1.0


def test_an_object_may_list_its_tools_and_take_their_calls():
    environment = made(Listed)
    turns = [[call("greet", whom="Eve") + END, call("call", whom="Eve") + END, "done" + END]]
    prompts, (played,) = play(environment, [{}], turns)
    assert '"name": "greet"' in TOKENIZER.decode(prompts[0].input_ids)
    assert "greet: Eve" in read(played)
    assert "there is no tool call; there are greet" in read(played)
    with failing("nobody is there"):
        play(environment, [{}], [[call("greet") + END]])


def answered(address):
    """Wait until something listens there."""
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(address) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(script, *arguments):
    """The address of a server that a script of the helpers runs at the port it is told."""
    port = free_port()
    command = [sys.executable, HERE / script, str(port), *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            answered(("127.0.0.1", port))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def play_mcp(server):
    environment = load(f"mcp:{server}")
    assert environment.label() is None
    turns = [
        [call("add", a=19, b=23) + call("add", a="x") + END, "done" + END],
        [call("nosuch") + END, call("add", a=1, b=2) + END, "done" + END],
    ]
    prompts, played = play(environment, [{}, {}], turns, copies=2)
    shown = TOKENIZER.decode(prompts[0].input_ids)
    assert "The sum of two numbers." in shown
    assert '"required": ["a", "b"]' in shown
    told = [
        [m["content"] for m in json.loads(each.episode.earlier) if m["role"] == "tool"]
        for each in played
    ]
    assert told[0][0] == "42"
    assert told[0][1].startswith("{'error': ")
    assert "Input should be a valid integer" in told[0][1]
    assert told[2][0] == "{'error': 'there is no tool nosuch; there are add, leave'}"
    assert told[2][1] == "3"
    assert told[::2] == told[1::2]
    assert rewards(played) == [None] * 4
    with pytest.raises(EnvironmentFailedError) as caught:
        play(environment, [{}], [[call("leave") + END]])
    assert str(caught.value.__cause__) == f"the server of --environment mcp:{server} ended"


def test_tools_of_an_mcp_server_over_standard_streams():
    pytest.importorskip("mcp")
    play_mcp(f"{sys.executable} {HERE / 'mcp_tools.py'}")


@pytest.mark.thorough
def test_tools_of_an_mcp_server_over_http():
    pytest.importorskip("mcp")
    with served("mcp_tools.py") as address:
        play_mcp(f"{address}/mcp")


def test_an_older_package_is_refused_by_the_version_that_is_needed(monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(checks, "version", {"mcp": "1.30.0"}.get)
    with pytest.raises(
        ValueError, match=r"^--environment mcp:x needs mcp>=2, found 1\.30\.0: pip in"
    ):
        factory("mcp:x")
    for fits in ("2.0.0", "10.1"):
        monkeypatch.setattr(checks, "version", {"mcp": fits}.get)
        assert factory("mcp:x") is not None


def test_what_is_no_mcp_server_is_refused():
    pytest.importorskip("mcp")
    for server in ("nosuch-command", f"{sys.executable} -c 1", "http://127.0.0.1:9/mcp"):
        with pytest.raises(ValueError, match=f"--environment mcp:{server} is not a server: "):
            load(f"mcp:{server}")


@pytest.mark.thorough
def test_no_process_of_an_mcp_server_is_left():
    pytest.importorskip("mcp")
    server = f"{sys.executable} {HERE / 'mcp_tools.py'}"
    code = (
        "import os, sys, psutil\n"
        "from dschat_lora.addons.environments.libraries import made_by\n"
        f"made = [made_by('mcp:{server}')() for _ in range(2)]\n"
        "print(*(each.pid for each in psutil.Process().children()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    (number,) = ended.stdout.split()
    assert ended.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def test_openenv_plays_until_the_server_is_done():
    pytest.importorskip("openenv")
    with served("openenv_server.py", "one", "8") as address:
        environment = load(f"openenv:{address}/")
        assert environment.label() == "openenv"
        right = [str(random.Random(n).randrange(10)) for n in range(3)]
        assert len(set(right)) > 1
        turns = [[f" {right[0]}" + END], ["no" + END] * 2, ["no" + END, right[2] + END]]
        prompts, played = play(environment, episodes(0, 1, 2), turns, copies=2)
        assert questions(prompts) == [f"Guess {each}." for each in right]
        assert rewards(played)[::2] == rewards(played)[1::2] == [1.0, 0.25, 1.0]
        assert "wrong" in read(played[2])
        # Sessions serve later episodes: a ninth would be refused.
        play(environment, episodes(0, 1, 2), turns, copies=2)
        with failing("max_concurrent_envs"):
            play(environment, episodes(0, 1, 2), turns, copies=3)


def test_fields_of_openenv_are_named_where_there_are_several():
    pytest.importorskip("openenv")
    with served("openenv_server.py", "several", "8") as address:
        with pytest.raises(ValueError, match="action are text, thought; name one by .field=NAME"):
            load(f"openenv:{address}")
        with pytest.raises(ValueError, match="an observation has no field x; it has "):
            load(f"openenv:{address}?field=text&observation=x")
        names = ("field=text", "field=text&observation=more")
        shown = [
            questions(play(load(f"openenv:{address}?{each}"), episodes(1), [["2" + END]])[0])
            for each in names
        ]
    assert json.loads(shown[0][0]) == {"reply": "Guess 2.", "left": 2, "more": "more"}
    assert shown[1] == ["more"]
    for none, words in (("localhost:80", "begins with http"), (address, "no description")):
        with pytest.raises(ValueError, match=words):
            load(f"openenv:{none}?field=x")


def test_tasks_of_verifiers_are_answered_with_their_tools(monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.chdir(HERE / "tasksets")
    environment = load("verifiers:vf_sums")
    assert environment.label() == "vf_sums"
    turns = [
        ["0" + END],
        [call("adder_add", a=1, b=1) + END, "2" + END],
        [call("adder_add", a="x") + call("add") + END, "5" + END],
        ["0" + END],
    ]
    prompts, played = play(environment, episodes(0, 1, 2, 3), turns, copies=2)
    assert questions(prompts) == ["0 plus 0?", "1 plus 1?", "2 plus 2?", "0 plus 0?"]
    assert [m["role"] for m in json.loads(prompts[0].columns)["prompt"]] == ["system", "user"]
    assert "The sum of two numbers." in TOKENIZER.decode(prompts[0].input_ids)
    assert rewards(played)[::2] == rewards(played)[1::2] == [2.0, 2.5, 0.0, 2.0]
    told = [m["content"] for m in json.loads(played[4].episode.earlier) if m["role"] == "tool"]
    assert "error" in told[0]
    assert told[1] == "{'error': 'there is no tool add'}"


def test_an_environment_of_verifiers_has_its_own_turns(monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.chdir(HERE / "tasksets")
    environment = load("verifiers:vf_digits?rounds=3")
    turns = [["1" + END, "x" + END, "3" + END], ["no" + END] * 3]
    prompts, played = play(environment, episodes(0, 5), turns)
    assert questions(prompts) == ["Digit 0?", "Digit 5?"]
    assert rewards(played) == [12.0, 10.0]
    assert "2 more?" in read(played[0])
    assert "1 more?" in read(played[0])
    # An episode that was cut off leaves nothing to the next.
    environment.begin(prompts, range(2), 1, ("seed", 4))
    cut_off = [made._run for made in environment.objects.values()]
    assert rewards(play(environment, episodes(0, 5), turns)[1]) == [12.0, 10.0]
    assert [run.cancelled() for run in cut_off] == [True, True]


def test_what_verifiers_cannot_play_is_refused(monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.chdir(HERE / "tasksets")
    for name, words in (
        ("vf_stops", "vf_stops needs hooks that stop or intercept the agent, which is not"),
        ("nosuch", "--environment verifiers:nosuch: taskset 'nosuch' not found"),
        ("vf_digits?rounds=x", "--environment verifiers:vf_digits.rounds=x: .*rounds"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}"):
            load(f"verifiers:{name}")
