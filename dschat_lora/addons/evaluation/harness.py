"""Tasks of lm-evaluation-harness: a trained model scores and answers by this package's own code."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lm_eval import evaluator
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as cut_at
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dschat_lora.addons.evaluation.config import EvalConfig
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.data.samples import SequenceSample
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import broadcast_string, gather_texts, rank, world_size
from dschat_lora.generation.sampling import Sampling
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.supervised.generate import AnswerGenerator
from dschat_lora.supervised.inference import LoadedPolicy, LossMeter, load_policy
from dschat_lora.supervised.setup import SupervisedSetup

DEFAULT_POSITIONS = 2048  # of a model without a limit, as in the harness
DEFAULT_NEW_TOKENS = 256  # of an answer whose task says nothing, likewise
ItemT = TypeVar("ItemT")
ValueT = TypeVar("ValueT")
Request = tuple[Any, list[int], list[int]]  # texts or None, tokens of context and continuation


def measure_tasks(config: EvalConfig) -> dict[str, float]:
    """Measures of every task that ``--tasks`` names, ``TASK MEASURE`` by its value.

    Raises:
        ValueError: if there is no such task.
    """
    tasks = find_tasks(config.tasks)
    model = HarnessModel(load_policy(config.model), batch_size=config.per_device_eval_batch_size)
    measures = tasks.measure(
        model,
        num_fewshot=config.num_fewshot,
        limit=config.limit or None,
        apply_chat_template=config.apply_chat_template,
    )
    return {f"{task} {measure}": value for (task, measure), value in measures.items()}


def task_measures(
    given: Sequence[str],
    limit: int | None,
    setup: SupervisedSetup,
    engine: TrainEngine[BackboneModel],
) -> Callable[[], dict[str, float]]:
    """A function that measures ``--eval_tasks``: ``task/NAME/MEASURE``; call on every rank.

    Raises:
        ValueError: if there is no such task, or no row is held out.
    """
    if not len(setup.data.eval):
        raise ValueError(
            "--eval_tasks are run when held-out rows are evaluated, and there are none: give "
            "--eval_data_path or --eval_ratio"
        )
    tasks = find_tasks(given, option="--eval_tasks")
    model = HarnessModel(
        LoadedPolicy(setup.source, engine.module.model, setup.tokenizer),
        batch_size=setup.config.batch.per_device_eval_batch_size,
        check=setup.run.interrupts.check,
    )

    def measure() -> dict[str, float]:
        engine.eval()
        with redirect_stderr(StringIO()):  # its bars of progress
            values = tasks.measure(model, limit=limit)
        # A report knows errors by this name.
        return {
            f"task/{task}/{name.replace('_stderr', '_standard_error')}": value
            for (task, name), value in values.items()
        }

    return measure


@dataclass(frozen=True)
class Tasks:
    """Tasks by their names, and where the harness finds them."""

    names: list[str]
    manager: TaskManager

    def measure(
        self, model: "HarnessModel", *, limit: int | None, **options: object
    ) -> dict[tuple[str, str], float]:
        """The value of each (task, measure), of ``limit`` questions a task; on every rank."""
        # Outside of a repository git complains on the terminal.
        evaluator.get_git_commit_hash = str
        evaluated = evaluator.simple_evaluate(
            model,
            tasks=self.names,
            task_manager=self.manager,
            limit=limit,
            log_samples=False,
            **options,
        )
        # The first process of each host alone is given them.
        results = broadcast_string(
            json.dumps(evaluated["results"], default=str) if rank() == 0 else ""
        )
        return {
            (task, name.removesuffix(",none").replace(",", " ")): float(value)
            for task, measures in json.loads(results).items()
            for name, value in measures.items()
            if isinstance(value, int | float) and name != "sample_len"
        }


def find_tasks(given: Sequence[str], *, option: str = "--tasks") -> Tasks:
    """The tasks of these names, and all of directories.

    Raises:
        ValueError: if there is no such task.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [each for each in given if Path(each).expanduser().is_dir()]
    # The harness's own tasks are read only where one is named: they are thousands.
    manager = TaskManager(
        include_path=[str(Path(each).expanduser()) for each in folders],
        include_defaults=len(folders) < len(given),
    )
    names = [name for name in given if name not in folders]
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"{option} {unknown[0]} is neither a task of lm-evaluation-harness nor a directory of "
            "task files; lm-eval ls tasks lists the tasks"
        )
    for folder in folders:
        own = TaskManager(include_path=str(Path(folder).expanduser()), include_defaults=False)
        if not own.all_tasks:
            raise ValueError(f"{option} {folder} contains no task: no .yaml file with a line task:")
        names += own.all_subtasks
    return Tasks(names, manager)


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A language model in the harness's interface, with tokens and scores as its own has them.

    Processes share the questions, of which each is asked all. ``check`` is called at each batch,
    on every rank.
    """

    def __init__(
        self, policy: LoadedPolicy, *, batch_size: int, check: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._check = check
        self.tokenizer, self._policy, self._size = policy.tokenizer, policy, batch_size
        self._meter = LossMeter(policy.model, policy.tokenizer)
        self._positions = policy.positions or DEFAULT_POSITIONS

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one of a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The name that caches of requests know the tokenizer by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: object
    ) -> list[int]:
        """Tokens of a text, with the tokenizer's own beginning unless the text has it."""
        if add_special_tokens is None:
            begin = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not string.startswith(begin)
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the text of a prompt."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **unused: object
    ) -> list[tuple[float, bool]]:
        return self._shared(requests, self._own_loglikelihoods)

    def _shared(
        self, items: Sequence[ItemT], answer: Callable[[Sequence[ItemT]], list[ValueT]]
    ) -> list[ValueT]:
        """What ``answer`` gives of each item, of which each rank answers as many as another."""
        if world_size() == 1:
            return answer(items)
        padded = [*items, *list(items[:1]) * (-len(items) % world_size())]
        parts = gather_texts(json.dumps(answer(padded[rank() :: world_size()])))
        in_turn = zip(*map(json.loads, parts), strict=True)
        return list(chain.from_iterable(in_turn))[: len(items)]

    def _own_loglikelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        samples = []
        for _, context, continuation in requests:
            # A token is predicted at each position: one more than these fits.
            ids = [*context, *continuation][-(self._positions + 1) :]
            before = max(1, len(ids) - len(continuation))
            samples.append(SequenceSample(np.array(ids, np.int32), (before, len(ids) - before)))
        scores_of: list[tuple[float, bool]] = [(0.0, False)] * len(samples)
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].input_ids))
        for first in range(0, len(order), self._size):
            chunk = order[first : first + self._size]
            self._check()
            scores = self._meter.scores([samples[i] for i in chunk], positions=self._positions)
            for i, score in zip(chunk, scores, strict=True):
                scores_of[i] = score
        return scores_of

    def loglikelihood_rolling(self, requests: Sequence[Any], **unused: object) -> list[float]:
        """Log-probability of each whole text, in windows of the model's positions."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._positions,
                context_len=1,
            ):
                context, continuation = make_disjoint_window(window)
                windows.append((None, list(context), list(continuation)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        return sums

    def generate_until(self, requests: Sequence[Any], **unused: object) -> list[str]:
        """Answers up to the texts at which they are to end.

        Raises:
            ValueError: at an option of a task that this package does not draw by.
        """
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            options = normalize_gen_kwargs(requests[numbers[0]].args[1], DEFAULT_NEW_TOKENS)
            sampling, until = self._sampling(options)
            room = self._positions - sampling.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"a task requests {sampling.max_new_tokens} new tokens, but the model has "
                    f"{self._positions} positions"
                )
            asked = [(n, self.tok_encode(requests[n].args[0])[-room:]) for n in numbers]
            texts = self._shared(asked, partial(self._answers, sampling))
            for n, text in zip(numbers, texts, strict=True):
                answers[n] = cut_at(text, until, None)
        return answers

    def _answers(self, sampling: Sampling, asked: Sequence[tuple[int, list[int]]]) -> list[str]:
        """Answers to prompts, each drawn by the number that stands with it."""
        self._check()
        generate = AnswerGenerator(self._policy, sampling, batch_size=self._size)
        seeds = [[stream_seed("generate", 0, n, 0)] for n, _ in asked]
        return [answer.text for (answer,) in generate([ids for _, ids in asked], seeds=seeds)]

    def _sampling(self, options: Mapping[str, Any]) -> tuple[Sampling, list[str]]:
        """How to draw, and the texts that end an answer."""
        given = dict(options)
        until = handle_stop_sequences(
            given.pop("until", None), self.tokenizer.decode(self.eot_token_id)
        )
        most, draws = given.pop("max_gen_toks"), bool(given.pop("do_sample", False))
        drawn = {
            name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given
        }
        if given:
            raise ValueError(
                f"a task sets {', '.join(given)} for generation; supported are until, "
                "max_gen_toks, do_sample, temperature, top_p and top_k"
            )
        return Sampling(most, do_sample=draws, **(drawn if draws else {})), until
