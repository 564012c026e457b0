"""Scores of single answers by a reward model."""

import threading
from collections.abc import Iterable, Sequence

from dschat_lora.data.chat import make_chat
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
        options = config.loading.model(config.reward)
        self._scorer = Scorer(options, bases=bases)
        self._chat = make_chat(self._scorer.tokenizer, config.loading.chat_template_kwargs)
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
