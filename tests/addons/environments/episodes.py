"""Episodes of scripted turns with an environment that has state."""

import json
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.addons.environments.environment import EnvironmentFailedError
from dschat_lora.addons.environments.players import Episodes
from dschat_lora.addons.environments.stateful import StatefulEnvironment
from dschat_lora.addons.environments.turn_tokens import TurnTokens
from dschat_lora.data.chat import Chat
from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.response.response import DecodedTurn, unanswered

TOKENIZER = build_chat_tokenizer("qwen3_instruct_2507")
CHAT = Chat(TOKENIZER, TOKENIZER.eos_token)
END = "<|im_end|>"


def tokens(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def made(found, **options):
    option = {"chat": CHAT, "max_prompt_tokens": 4000} | options
    environment = StatefulEnvironment("environment", "mine:Env", found, TOKENIZER, **option)
    environment.make_first()
    return environment


def prompts_of(rows):
    blank = {"prompt": [{"role": "user", "content": ""}]}
    samples = [json.dumps({**blank, **row}).encode() for row in rows]
    return [PromptSample(np.array([7], dtype=np.int32), columns) for columns in samples]


class Script:
    """Stands for what draws turns: ``turns[row]`` are the tokens of each, alike for all copies."""

    def __init__(self, turns, *, is_end, copies=1, max_tokens=4000):
        self.turns, self.is_end, self.copies, self.max_tokens = turns, is_end, copies, max_tokens
        self.told = []  # place, turn and tokens before it, of later turns
        self.drawn = Counter()

    def __call__(self, responses):
        found = []
        for each in responses:
            place = each.origin.place
            said = self.turns[place // self.copies][self.drawn[place]]
            self.drawn[place] += 1
            if each.tokens:
                self.told.append((place, self.drawn[place], each.tokens))
            turn = DecodedTurn([*said], [], [], False).cut(self.is_end, lambda tokens: None)
            found.append(each.with_turn(turn))
        return found


def play(environment, rows, turns, copies=1, max_tokens=4000):
    """Episodes of scripted turns: ``turns[row]``, alike for all copies."""
    player = Episodes(environment, TurnTokens(CHAT, TOKENIZER), 4)
    prompts = player.begin(prompts_of(rows), range(len(rows)), copies, ("seed", 3))
    tasks = [
        unanswered(n, prompt, n * copies + k)
        for n, prompt in enumerate(prompts)
        for k in range(copies)
    ]
    script = [[*map(tokens, own)] for own in turns]
    draw = Script(script, is_end=lambda token: True, copies=copies, max_tokens=max_tokens)
    return prompts, player.play(tasks, draw, key=())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def read(response):
    """What the environment said, as text."""
    mask = response.actor_mask or (True,) * len(response.tokens)
    said = [t for t, own in zip(response.tokens, mask, strict=True) if not own]
    return TOKENIZER.decode(said)


@contextmanager
def failing(words):
    """A block in which an environment fails by an error that has these words."""
    with pytest.raises(EnvironmentFailedError) as caught:
        yield
    assert words in str(caught.value.__cause__)
