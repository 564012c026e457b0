"""What distillation reads beside the actor's own responses: a teacher's prompts, data's answers."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dschat_lora.data.chat import Chat, make_chat
from dschat_lora.data.encoder import Encoder, make_encoder
from dschat_lora.data.message_layouts import message
from dschat_lora.data.messages import Message, content_text
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import DEFAULT_OPTIONS, RowOptions, parse_row, row_options
from dschat_lora.data.samples import SequenceSample
from dschat_lora.engine.distributed import world_size
from dschat_lora.models.loading import Tokenizer, load_config
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import Sources
from dschat_lora.rl.response.response import Origin, Response
from dschat_lora.runtime.run import OpenRun

if TYPE_CHECKING:
    from dschat_lora.rl.learn.served_teacher import ServedTeacher


@dataclass(frozen=True)
class TeacherPrompts:
    """Puts a system message at the head of each prompt, for the teacher alone to read."""

    system: str
    chat: Chat
    encoder: Encoder
    tokenizer: Tokenizer
    most: int  # positions of the teacher
    options: RowOptions = DEFAULT_OPTIONS  # by which the rows were read

    def __call__(self, responses: Sequence[Response]) -> list[Response]:
        """The responses with what the teacher reads in the place of their prompts.

        A row of messages, in whatever layout, gets it by the chat template, before the text of a
        system message that it has. Before a prompt that is text, it stands as text.

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
        row = parse_row(
            RawRow("--teacher_system_prompt", json.loads(response.columns)), self.options
        )
        names: tuple[str, ...] = ("messages" if row.kind == "conversation" else "prompt",)
        if row.kind == "preference" and "prompt" not in row.values:
            names = ("chosen", "rejected")  # which begin with it
        has_messages = isinstance(row.values[names[0]], list) and not row.is_encoded
        if has_messages:
            headed = {name: self._headed(row.values[name]) for name in names}
            row = row._replace(values={**row.values, **headed})
        prompt = to_records(row, self.chat, "prompts")[0].prompt
        return prompt if has_messages else self.system + prompt

    def _headed(self, messages: Sequence[Message]) -> list[Message]:
        first, *rest = messages
        if first["role"] != "system":
            return [message("system", self.system), *messages]
        text = f"{self.system}\n\n{content_text(first['content'])}"
        return [{**first, "content": text}, *rest]


@dataclass(frozen=True)
class Teacher:
    """A teacher that is not among the roles, and what it reads."""

    server: "ServedTeacher | None"  # in the place of a reference among the roles
    prompts: TeacherPrompts | None  # None: the reference reads what the actor reads


def load_teacher(
    config: RlhfConfig, tokenizer: Tokenizer, sources: Sources, run: OpenRun[RlhfConfig]
) -> Teacher:
    """The teacher of the options; call on every rank.

    Raises:
        ValueError: if its server cannot be used.
    """
    served, prompts = None, None
    if config.teacher.server is not None:
        from dschat_lora.rl.learn.served_teacher import open_teacher

        served = open_teacher(
            *config.teacher.server,
            tokenizer,
            max_seq_len=config.data.max_seq_len,
            timeout=config.addons.engines.rollout_timeout,
            in_flight=config.batch.per_device_generation_batch_size * world_size(),
            say=lambda words: run.log.say(f"  note         --teacher_model_name_or_path: {words}"),
        )
        run.closing.callback(served.pool.close)
        most = sys.maxsize if served.limit is None else served.limit - 1  # it draws a token
    else:
        options = config.actor if sources.teacher is None else config.teacher
        fields = load_config((sources.teacher or sources.actor).base, options.model(config.load))
        most = getattr(fields, "max_position_embeddings", None) or sys.maxsize
    if config.teacher.teacher_system_prompt is not None:
        prompts = TeacherPrompts(
            config.teacher.teacher_system_prompt,
            make_chat(tokenizer, config.data.data.chat_template_kwargs),
            make_encoder(tokenizer),
            tokenizer,
            most=most,
            options=row_options(config.data.data),
        )
    return Teacher(served, prompts)


def answer_of(sample: SequenceSample, *, group: int) -> Response:
    """A sample of data as if it were a response, to learn from its supervised tokens."""
    supervised = sample.supervised
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
        origin=Origin(source=sample.source, is_drawn=False),
    )
