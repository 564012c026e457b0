"""Chat in the terminal."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dschat_lora.addons.serving.config import ChatConfig
from dschat_lora.addons.serving.decoder import AnswerDecoder, RunningAnswer
from dschat_lora.addons.serving.endpoint.errors import StoppedError, TooLongError
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions
from dschat_lora.addons.serving.endpoint.text import read_messages
from dschat_lora.addons.serving.endpoint.turns import Piece
from dschat_lora.addons.serving.models import AnswerScorer, ServedModel, open_models
from dschat_lora.config.staging import write_whole
from dschat_lora.data.messages import Message
from dschat_lora.report.terminal import is_terminal, log_once, note, write_text

COMMANDS = {
    "/help": "show this",
    "/image FILE": "attach a picture to the next message",
    "/regenerate": "answer the last question again",
    "/reset": "forget the conversation",
    "/save FILE": "save the conversation as training data for step 1, one JSON line per model",
    "/set NAME VALUE": "change temperature, top_p, top_k, max_new_tokens, seed or system",
    "/quit": "quit, like Ctrl-D; Ctrl-C stops an answer",
}
_NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_new_tokens": int,
    "seed": int,
}


@dataclass
class ModelHistory:
    """What has been said with one model."""

    model: ServedModel
    messages: list[Message] = field(default_factory=list)  # without the system prompt


class ChatSession:
    """A conversation with each of the models, which are all asked the same.

    Args:
        models: that answer, in order.
        decoder: started.
        config: options of sampling, and the system prompt.
        scorer: of answers, if there is one.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        decoder: AnswerDecoder,
        config: ChatConfig,
        scorer: AnswerScorer | None = None,
    ) -> None:
        self.config = config
        self._conversations = [ModelHistory(model) for model in models]
        self._decoder, self._scorer = decoder, scorer
        self._pictures: list[Message] = []  # parts, for what is asked next

    def run(self, read: Callable[[], str]) -> None:
        """Answer what ``read`` returns, line by line, until EOFError or the decoder's end."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                log_once("\n(quit with Ctrl-D or /quit)")
                continue
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self.obey(line)
                elif line:
                    self.ask(line)
            except StoppedError:
                return
            except (ValueError, OSError) as error:
                note(f"error: {error}")
            except KeyboardInterrupt:
                log_once("\n(stopped)")

    def obey(self, line: str) -> None:
        """Do what a line that begins with a slash says.

        Raises:
            ValueError: if it is no command, or its value is none.
            OSError: if a file cannot be written.
        """
        command, _, rest = line.partition(" ")
        if command == "/help":
            width = max(map(len, COMMANDS))
            log_once("\n".join(f"{name:{width}}  {text}" for name, text in COMMANDS.items()))
        elif command == "/reset":
            self._pictures.clear()
            for each in self._conversations:
                each.messages.clear()
        elif command == "/regenerate":
            self.regenerate()
        elif command == "/set":
            self.set(*rest.strip().partition(" ")[::2])
        elif command == "/save":
            self.save(rest.strip())
        elif command == "/image":
            self.show_picture(rest.strip())
        else:
            raise ValueError(f"{command} is not a command; /help lists them")

    def set(self, name: str, value: str) -> None:
        """Change an option.

        Raises:
            ValueError: naming the options, or what is allowed.
        """
        value = value.strip()
        if name == "system":
            self.config = replace(self.config, system=value or None)
            return
        if name not in _NUMBERS:
            raise ValueError(f"/set {name}: give one of {', '.join(_NUMBERS)}, system, and a value")
        kind = _NUMBERS[name]
        try:
            changes: dict[str, Any] = {name: kind(value)}
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"/set {name} {value}: give {what}") from error
        self.config = replace(self.config, **changes)

    def save(self, file: str) -> None:
        """Write the conversations; a file that is there is not overwritten.

        Raises:
            ValueError: if there is nothing to write, or no file named.
            OSError: if it cannot be written.
        """
        if not file:
            raise ValueError("/save needs a file")
        rows = [
            {"messages": self._messages(each), "model": each.model.name}
            for each in self._conversations
            if each.messages
        ]
        if not rows:
            raise ValueError("/save: nothing has been said")
        path = Path(file).expanduser()
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        log_once(f"saved to {path}")

    def show_picture(self, file: str) -> None:
        """Take a picture along with what is asked next.

        Raises:
            ValueError: if there is none in the file, or a model takes text only.
        """
        if not file:
            raise ValueError("/image needs a file")
        part = {"type": "image", "image": str(Path(file).expanduser().absolute())}
        for each in self._conversations:
            if each.model.media is None:
                raise ValueError(f"{each.model.name} takes text only")
            read_messages([{"role": "user", "content": [part]}], each.model.media, Path())
        self._pictures.append(part)

    def ask(self, text: str) -> None:
        """Have each model answer, and write the answers as they come.

        Raises:
            ValueError: if the conversation is too long for a model.
        """
        self._forget_question()  # one whose answer was stopped before it began
        content: str | list[Message] = text
        if self._pictures:
            content = [*self._pictures, {"type": "text", "text": text}]
            self._pictures = []
        for each in self._conversations:
            each.messages.append({"role": "user", "content": content})
        self._answer()

    def regenerate(self) -> None:
        """Answer the last question anew.

        Raises:
            ValueError: if there is none.
        """
        if not any(each.messages for each in self._conversations):
            raise ValueError("/regenerate: nothing has been asked")
        for each in self._conversations:
            if each.messages and each.messages[-1]["role"] == "assistant":
                each.messages.pop()
        self._answer()

    def _answer(self) -> None:
        config = self.config
        options = AnswerOptions(
            config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            strip=True,
            cut=True,
        )
        asked: list[tuple[ModelHistory, RunningAnswer, SimpleQueue[Piece]]] = []
        try:
            for each in self._conversations:
                pieces: SimpleQueue[Piece] = SimpleQueue()
                read = read_messages(self._messages(each), each.model.media, Path())
                prompt = each.model.chat_ids(read)
                answer = self._decoder.submit(each.model, prompt, options, pieces.put)
                asked.append((each, answer, pieces))
            for each, _, pieces in asked:
                self._show(each, pieces)
        except TooLongError as error:
            self._forget_question()
            raise ValueError(f"{error}; /reset starts over") from error
        except ValueError:
            self._forget_question()
            raise
        finally:
            for _, answer, _ in asked:
                self._decoder.leave(answer)

    def _show(self, conversation: ModelHistory, pieces: "SimpleQueue[Piece]") -> None:
        """Write an answer as it comes, and its score; remember it, also where Ctrl-C stops it."""
        if len(self._conversations) > 1:
            write_text(f"{conversation.model.name}: ")
        text = ""
        try:
            while True:
                piece = pieces.get()
                text += piece.text
                write_text(piece.text)
                if piece.is_last:
                    break
        finally:
            # A turn without an answer is no conversation.
            if text.strip():
                conversation.messages.append({"role": "assistant", "content": text})
        write_text("\n")
        if piece.error is not None:
            note(f"error: {piece.error}")
        messages = self._messages(conversation)
        if self._scorer is not None and messages and messages[-1]["role"] == "assistant":
            score = self._scorer.score(messages)
            log_once("(reward: too long)" if score is None else f"(reward {score:.3f})")

    def _forget_question(self) -> None:
        for each in self._conversations:
            if each.messages and each.messages[-1]["role"] == "user":
                each.messages.pop()

    def _messages(self, conversation: ModelHistory) -> list[Message]:
        system = self.config.system
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *conversation.messages]


def run_chat(config: ChatConfig, read: Callable[[str], str] = input) -> None:
    """Chat until the standard input ends.

    Raises:
        ValueError: if a model cannot be loaded.
        OSError: if decoding ends by itself.
    """
    served = open_models(config, with_base=False)
    scorer = AnswerScorer(config, served.values()) if config.reward is not None else None
    decoder = AnswerDecoder(
        {model.batch for model in served.values()}, max_batch_size=len(served), max_queue=0
    )
    decoder.start()
    how = f"sampling at temperature {config.temperature:g} (/set temperature 0: greedy)"
    if config.temperature == 0:
        how = "greedy"
    note(f"{', '.join(served)}, {how}: type a message; /help lists commands, Ctrl-D quits")
    try:
        prompt = "> " if is_terminal() else ""
        ChatSession([*served.values()], decoder, config, scorer).run(lambda: read(prompt))
    finally:
        decoder.close()
        decoder.join()
    if decoder.failure is not None:
        raise OSError(decoder.failure)
