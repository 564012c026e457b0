"""Scores of single answers by a reward model."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dschat_lora.config.data import parse_variables
from dschat_lora.data.chat import Chat
from dschat_lora.data.messages import Message
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.serving.config import AnswerConfig
from dschat_lora.serving.models import ServedModel
from dschat_lora.supervised.score import Scorer


class AnswerScorer:
    """The reward model of ``--reward``, on the base of the answering models where it is theirs."""

    def __init__(self, config: AnswerConfig, served: Iterable[ServedModel]) -> None:
        bases = {model.base_path: model.batch.base for model in served}
        options = replace(config.model, model_name_or_path=config.reward)
        self._scorer = Scorer(options, bases=bases)
        tokenizer = self._scorer.tokenizer
        eos_text = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id)
        self._chat = Chat(tokenizer, eos_text, parse_variables(config.chat_template_kwargs))
        self._lock = threading.Lock()

    def score(self, messages: Sequence[Message]) -> float | None:
        """The score of the last message, an assistant's; None if the messages are too long.

        Raises:
            ValueError: if they cannot be scored.
        """
        row = parse_row(RawRow("messages", {"messages": list(messages)}))
        *_, record = to_records(row, self._chat, "pairs")
        with self._lock:
            return self._scorer.scores([record])[0]
