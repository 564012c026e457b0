"""Environments that are objects of a class: tools, rewards, rows and what is refused."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from addons.environments.episodes import (
    CHAT,
    END,
    TOKENIZER,
    call,
    failing,
    made,
    play,
    prompts_of,
    read,
)
from dschat_lora.addons.environments.addon import episode_prompt
from dschat_lora.addons.environments.environment import EnvironmentFailedError
from dschat_lora.addons.environments.players import load_environment
from dschat_lora.addons.environments.stateful import is_stateful
from dschat_lora.config.options import parse_config
from dschat_lora.config.when import without_effect
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.response import Beside
from dschat_lora.rl.score.scores import EpisodeScorer, RewardFunction, RewardFunctions, RewardSum
from dschat_lora.rl.score.user_functions import TrainerState

pytestmark = pytest.mark.usefixtures("one_rank")


class Increment:
    """As TRL documents an environment: it draws its task, and its methods are tools."""

    def reset(self, **kwargs):
        self.counter, self.target = 0, random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self):
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    async def decrement(self, step: int) -> int:
        """
        Decrement the internal counter.

        Args:
            step: Value to subtract from the counter.
        """
        self.counter -= step
        return self.counter

    def _hidden(self):
        raise AssertionError


class Given(Increment):
    """The same with the task of its row."""

    def reset(self, target, **kwargs):
        self.counter, self.target, self.more = 0, target, sorted(kwargs)


class Quiz:
    """A dialogue: two questions, a reward for each right answer."""

    def reset(self, row):
        self.asked = 0
        return [{"role": "user", "content": row["question"]}]

    def step(self, message):
        self.asked += 1
        reward = float("yes" in message["content"])
        return ("And now?", reward) if self.asked == 1 else (None, reward)


@pytest.mark.smoke
def test_methods_are_tools_and_the_object_scores_its_episode():
    environment = made(Given)
    turns = [
        [
            call("increment", step=2) + call("decrement", step=1) + END,
            call("increment", step=2) + END,
        ],
        [call("increment", step=9) + END, "done" + END],
        ["I do nothing" + END],
    ]
    turns[0].append("done" + END)
    rows = [{"target": 3}, {"target": 3, "hint": "x"}, {"target": 0}]
    prompts, played = play(environment, rows, turns)
    assert [each.episode.reward for each in played] == [1.0, 0.0, 1.0]
    told = [
        [m for m in json.loads(r.episode.earlier or b"[]") if m["role"] == "tool"] for r in played
    ]
    assert [[(m["name"], m["content"]) for m in each] for each in told] == [
        [("increment", "2"), ("decrement", "1"), ("increment", "3")],
        [("increment", "9")],
        [],
    ]
    assert read(played[1]).count("<tool_response>\n9\n</tool_response>") == 1
    text = TOKENIZER.decode(prompts[0].input_ids)
    assert '"name": "increment"' in text
    assert '"description": "Value to add to the counter."' in text
    assert "_hidden" not in text
    assert "get_reward" not in text
    assert environment.objects[1].more == ["hint", "prompt"]


def test_copies_of_a_prompt_begin_alike_and_prompts_do_not():
    environment = made(Increment)
    state, array_state = random.getstate(), np.random.get_state()[1].tolist()
    rows = [{} for _ in range(12)]
    prompts, _ = play(environment, rows, [["no" + END]] * 12, copies=3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (state, array_state)
    targets = [environment.objects[n].target for n in range(36)]
    assert all(len(set(targets[n : n + 3])) == 1 for n in range(0, 36, 3))
    assert len(set(targets)) > 2
    for n, prompt in enumerate(prompts):
        row = json.loads(prompt.columns)
        content = f"Increment the counter by {targets[3 * n]}."
        assert row["prompt"] == [{"role": "user", "content": content}]
        assert content in TOKENIZER.decode(prompt.input_ids)
    again = made(Increment)
    assert [p.columns for p in play(again, rows, [["no" + END]] * 12)[0]] == [
        p.columns for p in prompts
    ]


def test_objects_are_used_again():
    numbers = []

    class Counted(Given):
        def __init__(self):
            numbers.append(self)

    environment = made(Counted)
    for _ in range(3):
        play(environment, [{"target": 1}] * 2, [["no" + END]] * 2, copies=2)
    assert len(numbers) == 4


def test_a_step_answers_each_turn_and_gives_rewards():
    environment = made(Quiz)
    rows = [{"question": "Is it?"}, {"question": "Was it?"}]
    turns = [["yes" + END, "yes, yes" + END], ["no" + END, "yes" + END]]
    prompts, played = play(environment, rows, turns)
    assert [each.episode.reward for each in played] == [2.0, 1.0]
    assert [m["content"] for m in json.loads(prompts[0].columns)["prompt"]] == ["", "Is it?"]
    assert all("And now?" in read(each) for each in played)
    assert environment.label() == "Quiz"


def test_an_unknown_tool_and_a_failed_one_are_told_to_the_actor():
    environment = made(Given)
    turns = [[call("fly") + call("increment", by=2) + END, "oh" + END]]
    _, (played,) = play(environment, [{"target": 0}], turns)
    assert "there is no tool fly; there are decrement, increment" in read(played)
    assert "unexpected keyword argument" in read(played)
    assert played.episode.reward == 1.0


def test_rows_choose_among_several_environments():
    environment = made({"count": Given, "quiz": Quiz})
    rows = [{"environment": "quiz", "question": "?"}, {"environment": "count", "target": 4}]
    turns = [["yes" + END, "no" + END], [call("increment", step=4) + END, "done" + END]]
    prompts, played = play(environment, rows, turns)
    assert [each.episode.reward for each in played] == [1.0, 1.0]
    assert ["increment" in TOKENIZER.decode(p.input_ids) for p in prompts] == [False, True]
    with failing("environment is 'x'; known ones are 'count', 'quiz'"):
        environment.begin(prompts_of([{"environment": "x"}]), [0], 1, (1,))


def test_reward_functions_see_the_objects_and_rewards_are_added():
    environment = made(Given)
    turns = [[call("increment", step=3) + END, "done" + END], ["no" + END]]
    _, played = play(environment, [{"target": 3}, {"target": 3}], turns)

    def counters(completions, environments, **kwargs):
        return [float(each.counter) for each in environments]

    function = RewardFunction("reward_function", "mine:counters", counters, TOKENIZER)
    functions = RewardFunctions((function,), beside=Beside("environments", environment.objects))
    weights = {"counters": 0.5, "Given": 1.0}
    scorer = RewardSum((functions, EpisodeScorer(environment.label())), weights, str)
    scorer.check_columns({"target"})
    assert scorer.names == ("counters", "Given")
    assert scorer(played, TrainerState()).total.tolist() == [1.0 + 0.5 * 3, 0.0]


def test_a_text_without_an_addition_keeps_its_tokens():
    class Plain:
        def reset(self):
            return self.said

        def step(self, message):
            return None

    Plain.said = None
    row = {"prompt": "Once upon"}
    sample = PromptSample(np.array([3, 4], dtype=np.int32), json.dumps(row).encode(), source=2)
    (outcome,) = made(Plain).begin([sample], [0], 2, (1,))
    assert (outcome.input_ids.tolist(), json.loads(outcome.columns)) == ([3, 4], row)
    Plain.said = " a time"
    (outcome,) = made(Plain).begin([sample], [0], 2, (1,))
    expected = make_encoder(TOKENIZER).encode(["Once upon a time"])[0]
    assert outcome.input_ids.tolist() == expected
    assert json.loads(outcome.columns)["prompt"] == "Once upon a time"
    assert outcome.source == 2


class Different(Increment):
    def reset(self, **kwargs):
        self.__class__.number = getattr(self, "number", 0) + 1
        return str(self.number)


class Nan(Given):
    def get_reward(self):
        return float("nan")


class Long(Increment):
    def reset(self, **kwargs):
        return "no " * 4000


class Pair(Given):
    def reset(self, target, **kwargs):
        return "observation", {}


class Exits(Quiz):
    def step(self, message):
        raise SystemExit(0)


class Hangs(Quiz):
    async def step(self, message):
        await asyncio.sleep(60)


class Triple(Quiz):
    def step(self, message):
        return None, 1.0, True


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Different, "--environment mine:Env: reset returned '1' and '2' for copies of one prompt"),
        (Nan, "Env: an environment returned the reward nan; a reward must be a finite number"),
        (Pair, "Env: reset returned a tuple; it must return a text, a message, a list of messages"),
        (Triple, "Env: step returned a tuple of 3; return a reply, or a reply and the reward"),
        (Exits, "sys.exit was called"),
        (Hangs, "took more than the 0.2 seconds of --reward_timeout"),
        (Long, "--max_prompt_seq_len is 4000"),
    ],
)
def test_an_environment_that_does_wrong_is_named(found, words):
    environment = made(found, timeout=0.2 if found is Hangs else 0.0)
    with failing(words):
        play(environment, [{"target": 1, "question": "?"}], [["no" + END]], copies=2)


class Nothing:
    def reset(self):
        pass


class Untyped(Nothing):
    def add(self, number):
        return number


def make_nothing():
    return Nothing()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", "Nothing has neither a method step.message. that replies to the actor, nor"),
        ("make_nothing", "Nothing has neither a method step"),
        ("Untyped", "the method add is not a valid tool: .*give it type hints and a docstring"),
        ("END", "has no function END"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        load_environment(f"{__name__}:{name}", TOKENIZER, chat=CHAT, max_prompt_tokens=9)


def test_columns_that_reset_needs_are_asked_for():
    with pytest.raises(ValueError, match="reset asks for target; the data has the columns answer"):
        made(Given).check_columns({"answer"})
    made(Given).check_columns({"target"})
    made(Quiz).check_columns(())


def test_episodes_without_data_are_rows_of_their_numbers(tmp_path):
    def with_data(*arguments):
        config = parse_config(RlhfConfig, ["--data_output_path", str(tmp_path), *arguments])
        return config.addons.environments.with_data(config)

    config = with_data("--num_prompts", "3", "--environment", "a:B")
    (path,) = config.data.data_path
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    assert rows == [{"prompt": episode_prompt(n), "episode": n} for n in range(3)]


@pytest.mark.smoke
def test_options_have_no_effect_without_an_environment():
    config = parse_config(RlhfConfig, ["--max_turns", "2", "--reward_retries", "1"])
    assert {*without_effect(config)} == {
        "--max_turns has no effect without --environment",
        "--reward_retries has no effect without --reward_function or --environment",
    }
    given = ["--max_turns", "2", "--reward_retries", "1", "--environment", "a:B"]
    assert not without_effect(parse_config(RlhfConfig, given))


def test_a_tool_that_exits_is_told_to_the_actor():
    class Runs(Given):
        def run(self, code: str) -> str:
            """
            Run Python.

            Args:
                code: the program.
            """
            exec(code)
            return "ran"

    turns = [[call("run", code="exit(3)") + END, "oh" + END]]
    _, (played,) = play(made(Runs), [{"target": 0}], turns)
    assert "error" in read(played)


def test_what_a_coroutine_opens_serves_its_later_calls():
    class Connected(Quiz):
        async def reset(self, row):
            self.loop = asyncio.get_running_loop()

        async def step(self, message):
            assert asyncio.get_running_loop() is self.loop
            await asyncio.sleep(0)
            return None, 1.0

    rows, turns = [{"question": "?"}] * 3, [["no" + END]] * 3
    _, played = play(made(Connected), rows, turns)
    assert [each.episode.reward for each in played] == [1.0] * 3


def test_an_object_without_coroutines_may_run_a_loop_of_its_own():
    class Own(Quiz):
        def step(self, message):
            return None, asyncio.run(self._reward())

        async def _reward(self):
            return 2.0

    _, (played,) = play(made(Own), [{"question": "?"}], [["no" + END]])
    assert played.episode.reward == 2.0


def test_draws_of_a_step_are_those_of_its_episode_and_turn():
    class Draws(Quiz):
        def reset(self, row):
            self.drawn = []

        def step(self, message):
            self.drawn.append((random.random(), float(np.random.rand())))
            return "more" if len(self.drawn) < 3 else None

    def drawn():
        environment = made(Draws)
        play(environment, [{}] * 2, [["no" + END] * 3] * 2, copies=2)
        return [environment.objects[n].drawn for n in range(4)]

    first = drawn()
    random.seed()
    assert drawn() == first
    assert len({number for each in first for pair in each for number in pair}) == 24


def test_a_row_whose_prompt_has_another_name_is_refused_where_something_is_added():
    sample = PromptSample(np.array([3], dtype=np.int32), b'{"question": "?", "target": 1}')
    with pytest.raises(EnvironmentFailedError) as caught:
        made(Given).begin([sample], [0], 1, (1,))
    words = "must be in `prompt` or `messages`; this row has question, target"
    assert words in str(caught.value.__cause__)


def test_a_function_with_arguments_bound_is_no_class():
    assert not is_stateful(partial(lambda responses, style: responses, style=1))
    assert is_stateful(partial(Quiz))
