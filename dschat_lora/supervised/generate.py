"""Answers to prompts by a trained model, one JSON line or one text for each."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.addons import groups_of
from dschat_lora.config.plurals import counted
from dschat_lora.config.verbs import GenerateConfig
from dschat_lora.data.chat import Chat, Span, make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.media import MediaReader
from dschat_lora.data.records import TextRecord
from dschat_lora.data.samples import PromptSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.engine.distributed import device
from dschat_lora.engine.zero import broken_parameters
from dschat_lora.generation.generate import Decoder, check_cache
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.models.loading import end_ids
from dschat_lora.report.log import jsonable
from dschat_lora.report.terminal import note
from dschat_lora.supervised.inference import (
    LoadedPolicy,
    RowsConfig,
    last_record,
    load_policy,
    output_file,
    read_rows,
)

# Rows held in memory, sorted by length.
BATCHES_AT_A_TIME = 64


@dataclass(frozen=True)
class Answer:
    """A continuation of a prompt."""

    prompt: Sequence[int]  # token ids
    text: str  # without special tokens
    tokens: list[int]  # its end token included, if it has one
    ended: bool  # by an end token, and not by the limit
    undrawn: bool  # cut off, as the logits of its last token were not finite


class AnswerGenerator:
    """Answers tokenised prompts in batches of like length, on this machine's device."""

    def __init__(self, policy: LoadedPolicy, sampling: Sampling, *, batch_size: int) -> None:
        self._policy, self._tokenizer = policy, policy.tokenizer
        self._sampling, self._batch_size = sampling, batch_size
        self._ends = end_ids(policy.tokenizer)
        pad = int(policy.tokenizer.pad_token_id)
        check_cache(policy.model)
        self._decoder = Decoder(policy.model, eos_ids=self._ends, pad_id=pad, device=device())

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[Sequence[int]]
    ) -> list[list[Answer]]:
        """As many answers to each prompt as it has seeds, in the order of the prompts.

        Raises:
            ValueError: if a token cannot be drawn, as a weight is not finite.
        """
        answers: list[list[Answer]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), self._batch_size):
            chunk = order[first : first + self._batch_size]
            copies = len(seeds[chunk[0]])
            responses = self._decoder(
                [prompts[i] for i in chunk], self._sampling, seeds=[seeds[i] for i in chunk]
            )
            undrawn = responses.undrawn()
            if any(undrawn):
                weights = broken_parameters(dict(self._policy.model.named_parameters()))
                if weights:
                    raise ValueError(undrawn_reason(weights))
            asked = [prompts[i] for i in chunk for _ in range(copies)]
            flat = list(map(self._answer, asked, responses.tokens(), undrawn))
            for place, i in enumerate(chunk):
                answers[i] = flat[place * copies :][:copies]
        return answers

    def _answer(self, prompt: Sequence[int], ids: list[int], undrawn: bool) -> Answer:
        text = self._tokenizer.decode(ids[: len(ids) - undrawn], skip_special_tokens=True)
        return Answer(prompt, text, ids, not undrawn and ids[-1] in self._ends, undrawn)


def answer_prompts(
    config: GenerateConfig, policy: LoadedPolicy, room: int
) -> Iterator[list[tuple[TextRecord, list[Answer] | None]]]:
    """Prompts with their answers, some at a time; None to those of more than ``room`` tokens.

    Raises:
        ValueError: for a row that has no prompt.
    """
    drawn = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k")}
    sampling = Sampling(config.max_new_tokens, do_sample=config.samples, **drawn)
    generate = AnswerGenerator(policy, sampling, batch_size=config.per_device_eval_batch_size)
    chat = make_chat(policy.tokenizer, config.loading.chat_template_kwargs)
    waiting, count = all_prompts(config, chat), 0
    while records := [*islice(waiting, config.per_device_eval_batch_size * BATCHES_AT_A_TIME)]:
        prompts = prompt_ids(records, policy, room)
        kept = [i for i, ids in enumerate(prompts) if ids is not None]
        copies = range(config.num_return_sequences)
        seeds = [[stream_seed("generate", config.seed, count + i, n) for n in copies] for i in kept]
        answers = generate([prompts[i] or [] for i in kept], seeds=seeds)
        answered = dict(zip(kept, answers, strict=True))
        yield [(record, answered.get(i)) for i, record in enumerate(records)]
        count += len(records)


def generate_answers(config: GenerateConfig) -> None:
    """Write an answer, or several, to each prompt.

    Raises:
        ValueError: for a row that has no prompt, or lengths that the model has no positions for.
        OSError: if the output cannot be written.
    """
    policy = load_policy(config.model, config)
    room = room_for_prompts(policy, config.max_new_tokens, config.max_seq_len)
    in_json = config.json or config.output_path is not None
    count = too_long = undrawn = 0
    with output_file(config.output_path) as file:
        for answered in answer_prompts(config, policy, room):
            for record, answers in answered:
                for answer in (None,) if answers is None else answers:
                    file.write(_line(record, policy.media, answer, in_json=in_json) + "\n")
                count, too_long = count + 1, too_long + (answers is None)
                undrawn += sum(each.undrawn for each in answers or ())
            file.flush()
    if too_long:
        note(f"no answer to {counted(too_long, 'prompt')} of more than {room:,} tokens")
    if undrawn:
        note(f"{counted(undrawn, 'answer')} missing: {undrawn_reason(())}")
    if config.output_path is not None:
        note(f"{counted(count, 'prompt')} answered to {config.output_path}")


def answer_texts(config: GenerateConfig) -> list[str]:
    """The text of each answer, prompt after prompt.

    Raises:
        ValueError: for a prompt that is too long, or an answer of which no token can be drawn.
    """
    policy = load_policy(config.model, config)
    room = room_for_prompts(policy, config.max_new_tokens, config.max_seq_len)
    texts: list[str] = []
    for answered in answer_prompts(config, policy, room):
        for record, answers in answered:
            if answers is None:
                raise ValueError(
                    f"{record.location} is longer than {room:,} tokens, which leaves no room for "
                    f"--max_new_tokens {config.max_new_tokens}"
                )
            if any(each.undrawn for each in answers):
                raise ValueError(undrawn_reason(()))
            texts += [each.text for each in answers]
    return texts


def room_for_prompts(policy: LoadedPolicy, max_new_tokens: int, max_seq_len: int) -> int:
    """Tokens that a prompt may have so that an answer fits behind it.

    Raises:
        ValueError: if there is no room for a prompt.
    """
    limit = min(each for each in (policy.positions, max_seq_len, 2**31) if each)
    if max_new_tokens >= limit:
        raise ValueError(
            f"--max_new_tokens {max_new_tokens} leaves no room for a prompt within {limit} tokens"
        )
    return limit - max_new_tokens


def prompt_ids(
    records: Sequence[TextRecord], policy: LoadedPolicy, room: int
) -> list[list[int] | None]:
    """Token ids of prompts as step 3 has them; None for those of more than ``room`` tokens."""
    rule = TokenRule(int(policy.tokenizer.eos_token_id), room, "drop", False, kind="prompts")
    tokenized = tokenize(records, make_encoder(policy.tokenizer), rule)
    samples = [each.sample for each in tokenized]
    return [s.input_ids.tolist() if isinstance(s, PromptSample) else None for s in samples]


def all_prompts(config: GenerateConfig, chat: Chat) -> Iterator[TextRecord]:
    """The prompts of the line, then those of the rows."""
    beside = list(groups_of(config, "record_of"))
    for number, text in enumerate(config.prompts, start=1):
        location, messages = f"--prompts {number}", [{"role": "user", "content": text}]
        made = [own.record_of(location, messages if config.chat else text, chat) for own in beside]
        if config.chat:
            text = chat.render(messages, add_generation_prompt=True)
        yield next(filter(None, made), None) or _plain_prompt(location, text)
    yield from row_prompts(config, chat)


def row_prompts(config: RowsConfig, chat: Chat, *, limit: int = 0) -> Iterator[TextRecord]:
    """The prompt of each row; of a row of ``text``, all of it."""
    for values, row in read_rows(config, kind=None, limit=limit, media=chat.media):
        record = last_record(row, chat, "prompts")
        if row.kind == "text":
            text = record.spans[0].text
            record = _plain_prompt(row.location, text)._replace(media=record.media)
        columns = json.dumps(values, ensure_ascii=False, default=str)
        yield record._replace(columns=columns)


def _plain_prompt(location: str, text: str) -> TextRecord:
    return TextRecord(location, "prompt", (Span(text, target=False),))


def _line(
    record: TextRecord, media: MediaReader | None, answer: Answer | None, *, in_json: bool
) -> str:
    if not in_json:
        if answer is None:
            return "(too long)"
        return "(no token can be drawn)" if answer.undrawn else answer.text
    prompt = record.prompt if media is None else media.shown(record.prompt, record.media)
    fields: dict[str, Any] = {"prompt": prompt, "response": None}
    if answer is not None and not answer.undrawn:
        fields |= {"response": answer.text, "tokens": answer.tokens, "ended": answer.ended}
    return json.dumps(jsonable(fields), ensure_ascii=False)
