"""What distillation reads beside the actor's own responses: a teacher's prompts, data's answers."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dschat_lora.addons.distill.config import TeacherConfig
from dschat_lora.addons.distill.divergence import DivergenceHead
from dschat_lora.algos.advantages import response_sums
from dschat_lora.algos.seeds import permutation, stream_seed
from dschat_lora.algos.segments import to_device
from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import Chat, make_chat
from dschat_lora.data.encoder import Encoder, make_encoder
from dschat_lora.data.message_layouts import message
from dschat_lora.data.messages import Message, content_text
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import DEFAULT_OPTIONS, RowOptions, parse_row, row_options
from dschat_lora.data.samples import PromptSample, SequenceSample
from dschat_lora.engine.distributed import device, world_size
from dschat_lora.models.loading import PreTrainedModel, Tokenizer, load_config
from dschat_lora.rl.draw.source import Pool
from dschat_lora.rl.learn.reference import Answers, Reference
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import Sources
from dschat_lora.rl.response.response import Origin, Response
from dschat_lora.rl.score.scores import Scorer, Scores
from dschat_lora.rl.score.user_functions import TrainerState
from dschat_lora.runtime.run import OpenRun

if TYPE_CHECKING:
    from dschat_lora.addons.distill.served_teacher import ServedTeacher


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
        longest = max(len(read[each.group]) + len(each.tokens) for each in responses)
        if longest > self.most:
            raise ValueError(
                f"--teacher_system_prompt with a prompt and its answer takes {longest:,} tokens, "
                f"but the teacher has {self.most:,} positions: shorten it, or lower "
                "--max_prompt_seq_len"
            )
        return [replace(each, reference_prompt=read[each.group]) for each in responses]

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
class TeacherScorer(Scorer):
    """Minus the divergence from the teacher, which is known once log-probabilities are."""

    names = ()

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """Zeros until then; NaN for a response that is left out."""
        total = [math.nan if each.is_left_out else 0.0 for each in responses]
        return Scores(
            to_device(torch.tensor(total), device()),
            once_known=lambda experience: -response_sums(experience.kl(), experience.mask),
        )


@dataclass(frozen=True)
class Teacher(Reference):
    """The teacher of the options, among the roles or behind a server."""

    config: RlhfConfig
    options: TeacherConfig
    server: "ServedTeacher | None" = None
    prompts: TeacherPrompts | None = None  # None: it reads what the actor reads

    def reading(self, responses: Sequence[Response]) -> list[Response]:
        """The responses with what the teacher reads in the place of their prompts."""
        return list(responses) if self.prompts is None else self.prompts(responses)

    def begin(self, responses: Sequence[Response]) -> Callable[[], list[list[float]]] | None:
        return None if self.server is None else self.server.begin(responses)

    def head(
        self, actor: PreTrainedModel, reference: PreTrainedModel, *, entropy_trains: bool
    ) -> DivergenceHead | None:
        """The divergence from the teacher over the whole vocabulary."""
        beta, top_k = self.options.beta, self.options.distill_top_k
        if beta is None:
            return None
        return DivergenceHead(
            actor, reference, beta=beta, top_k=top_k, entropy_trains=entropy_trains
        )

    def answers(self, read: Callable[[DataConfig, str, str], Prepared]) -> Answers | None:
        """Those of the data, of which the run takes as many as it needs."""
        data, share = self.config.data, self.options.on_policy_share
        if share == 1:
            return None
        answers = replace(data.data, max_seq_len=data.max_seq_len, max_repeats=())
        if answers.eval_data_path:  # prompts, which need no answers
            answers = replace(answers, eval_data_path=(), eval_ratio=0.0)
        prepared = read(
            answers,
            "answers",
            f"--on_policy_share {share:g} needs rows with answers, but --data_path "
            f"{' '.join(data.data_path)} has none: use --on_policy_share 1",
        )
        return Answers(answers, prepared, 1 - share)

    def mixed(
        self, prompts: Sequence[PromptSample], pool: Pool, *, iteration: int
    ) -> tuple[list[PromptSample], list[Response]]:
        """The share of the prompts that the actor answers, and answers of the data.

        Of a prompt all responses are drawn, or none; its fraction is rounded at random.
        """
        seed = self.config.run.seed
        wanted = self.options.on_policy_share * len(prompts)
        drawn = prompts[: int(wanted + stream_seed("on-policy share", seed, iteration) / 2**63)]
        order = permutation(len(pool), "answers", seed, iteration)
        count = (len(prompts) - len(drawn)) * self.config.batch.num_generations
        return list(drawn), [answer_of(pool[int(order[n % len(order)])]) for n in range(count)]

    def identity(self, fingerprint: str) -> dict[str, str]:
        """The teacher."""
        return {"teacher": fingerprint if self.server is None else self.server.model}


def load_teacher(
    own: TeacherConfig,
    config: RlhfConfig,
    tokenizer: Tokenizer,
    sources: Sources,
    run: OpenRun[RlhfConfig],
) -> Teacher:
    """The teacher of the options; call on every rank.

    Raises:
        ValueError: if its server cannot be used.
    """
    served, prompts = None, None
    if own.server is not None:
        from dschat_lora.addons.distill.served_teacher import open_teacher

        served = open_teacher(
            *own.server,
            tokenizer,
            max_seq_len=config.data.max_seq_len,
            timeout=config.addons.engines.rollout_timeout,
            in_flight=config.batch.per_device_generation_batch_size * world_size(),
            say=lambda words: run.log.say(f"  note         --teacher_model_name_or_path: {words}"),
        )
        run.closing.callback(served.pool.close)
    if own.teacher_system_prompt is not None:
        most: int | None = None
        if served is None:
            role = own.role if own.role in sources.by_role else "actor"
            fields = load_config(sources.of(role).base, config.model_of(role))
            most = getattr(fields, "max_position_embeddings", None)
        elif served.limit is not None:
            most = served.limit - 1  # it draws a token
        prompts = TeacherPrompts(
            own.teacher_system_prompt,
            make_chat(tokenizer, config.data.data.chat_template_kwargs),
            make_encoder(tokenizer),
            tokenizer,
            most=most or sys.maxsize,
            options=row_options(config.data.data),
        )
    return Teacher(config, own, served, prompts)


def answer_of(sample: SequenceSample) -> Response:
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
        group=0,
        actor_mask=() if mask.all() else tuple(mask.tolist()),
        origin=Origin(source=sample.source, is_drawn=False),
    )
