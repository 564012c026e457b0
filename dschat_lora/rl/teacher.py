"""What distillation reads beside the actor's own responses: a teacher's prompts, data's answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.batch import Response
from dschat_lora.rl.rewards import prompt_of


@dataclass(frozen=True)
class TeacherPrompts:
    """Puts a system message before each prompt, for the teacher alone to read."""

    system: str
    chat: Chat
    encoder: Encoder
    tokenizer: Tokenizer
    most: int  # positions of the teacher

    def __call__(self, responses: Sequence[Response]) -> list[Response]:
        """The responses with what the teacher reads in the place of their prompts.

        Before a prompt that is text, the system message stands as text.

        Raises:
            ValueError: if the chat template refuses it, or the teacher has too few positions.
        """
        prompts = {response.group: response for response in responses}
        texts = [self._text(response) for response in prompts.values()]
        read = dict(zip(prompts, map(tuple, self.encoder.encode(texts)), strict=True))
        found = [replace(each, reference_prompt=read[each.group]) for each in responses]
        longest = max(len(read[each.group]) + len(each.tokens) for each in responses)
        if longest > self.most:
            raise ValueError(
                f"--teacher_system_prompt with a prompt and its answer takes {longest:,} tokens, "
                f"the teacher has {self.most:,} positions: shorten it, or --max_prompt_seq_len"
            )
        return found

    def _text(self, response: Response) -> str:
        columns = json.loads(response.columns or b"{}")
        prompt = prompt_of(columns, self.tokenizer.decode(response.prompt))
        if isinstance(prompt, str):
            return self.system + prompt
        messages = [{"role": "system", "content": self.system}, *prompt]
        return self.chat.with_columns(columns).render(messages, add_generation_prompt=True)


def answer_of(sample: SequenceSample, *, group: int) -> Response:
    """A sample of data as if it were a response, to learn from its supervised tokens."""
    supervised = sample.labels != IGNORE_INDEX
    first = int(supervised.argmax())
    # What follows the last supervised token teaches nothing.
    end = len(supervised) - int(np.flip(supervised).argmax())
    prompt, tokens = sample.input_ids[:first].tolist(), sample.input_ids[first:end].tolist()
    mask = supervised[first:end]
    return Response(
        tuple(prompt),
        tuple(tokens),
        ended=True,
        group=group,
        actor_mask=() if mask.all() else tuple(mask.tolist()),
        is_drawn=False,
    )
