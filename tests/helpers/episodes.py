"""Episodes of scripted turns with an environment that has state."""

import json

import numpy as np

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.data.chat import Chat
from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.play.environment import Episodes
from dschat_lora.rl.play.stateful_environment import StatefulEnvironment
from dschat_lora.rl.play.turn_tokens import TurnTokens
from dschat_lora.rl.response.response import Response

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


def play(environment, rows, turns, copies=1, max_tokens=4000):
    """Episodes of scripted turns: ``turns[row]``, alike for all copies."""
    prompts = environment.begin(prompts_of(rows), range(len(rows)), copies, ("seed", 3))
    first = [
        Response(tuple(p.input_ids.tolist()), tokens(turns[n][0]), True, n, p.columns)
        for n, p in enumerate(prompts)
        for _ in range(copies)
    ]

    def next_turn(places, read, turn):
        found = []
        for place, response in zip(places, read, strict=True):
            said = tokens(turns[place // copies][turn - 1])
            mask = (*response.actor_mask, *(True for _ in said))
            grown = {"tokens": (*response.tokens, *said), "actor_mask": mask, "ended": True}
            found.append(Response(**{**vars(response), **grown}))
        return found

    episodes = Episodes(environment, TurnTokens(CHAT, TOKENIZER), 4)
    places = range(len(first))
    return prompts, episodes.play(first, next_turn, max_tokens=max_tokens, places=places)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def read(response):
    """What the environment said, as text."""
    mask = response.actor_mask or (True,) * len(response.tokens)
    said = [t for t, own in zip(response.tokens, mask, strict=True) if not own]
    return TOKENIZER.decode(said)
