"""What the runs of ``compare_runs.py`` read: data, models, functions of a user, a server."""

import gzip
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.glue_toys import save_encoder, write_task
from helpers.restaurants import save_base, write_data

logging.disable_progress_bar()

FUNCTIONS = '''
"""What a user would write: reward functions, environments and an agent."""


def score(responses):
    """Share of vowels, which no two texts of some length have alike."""
    return [sum(c in "aeiou" for c in text) / (1 + len(text)) for text in responses]


def by_thirds(responses):
    """A score of few values, so that groups of equal scores occur."""
    return [float(len(text) % 3 == 0) for text in responses]


def is_even(responses):
    """A gate: 0 for half of the texts."""
    return [1 - len(text) % 2 for text in responses]


def reply(responses, rows):
    """A further turn, or none, by the length of the last one."""
    words = [{"role": "user", "content": f"Why {len(text) % 7}?"} for text in responses]
    return [word if len(text) % 3 else None for word, text in zip(words, responses)]


class Counting:
    """Up to three turns, which earn by their letters and the whole episode by its prompt."""

    def reset(self, prompt, **row):
        self.left, self.total = 1 + len(prompt) % 3, 0
        return f"{self.left} left."

    def step(self, message):
        self.left -= 1
        word = {"role": "user", "content": f"{self.left} left."}
        return word if self.left else None, len(set(message["content"])) / 20

    def get_reward(self):
        return self.left / 4


async def play(row, client, model):
    """Ask twice where the first answer has an odd length."""
    messages = [{"role": "user", "content": row["question"]}]
    for turn in range(2):
        answer = await client.chat.completions.create(model=model, messages=messages)
        said = answer.choices[0].message.content
        if len(said) % 2 == 0:
            break
        messages += [
            {"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}
        ]
    return {"reward": len(said) / (1 + len(set(said))), "asked": turn + 1}
'''


def write_inputs(directory: Path, tree: Path, train: Callable[[str, str], Path]) -> None:
    """Write everything that the configurations name as ``{inputs}``.

    Args:
        directory: receives it.
        tree: the checkout whose bundled data and model are used.
        train: runs a script of ``training/`` with options and returns its output directory.
    """
    directory.mkdir(parents=True)
    assets = tree / "dschat_lora" / "assets"
    shutil.copytree(assets / "model", directory / "model")
    (directory / "user_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    with (assets / "data" / "train.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, 72)]
    _write_rows(directory / "train.jsonl", rows[:64])
    _write_rows(directory / "eval.jsonl", rows[64:])
    prompts = [{"prompt": row["prompt"]} for row in rows]
    _write_rows(directory / "prompts.jsonl", prompts[:64])
    _write_rows(directory / "eval_prompts.jsonl", prompts[64:])
    _write_rows(
        directory / "unpaired.jsonl",
        [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows
            for side in ("chosen", "rejected")
        ],
    )
    _write_rows(directory / "texts.jsonl", [{"text": row["prompt"]} for row in rows[:16]])
    for shard in range(3):
        _write_rows(directory / "shards" / f"{shard}.jsonl.gz", prompts[20 * shard :][:20])
    questions = [{"question": row["prompt"].strip().split(": ")[1].split("\n")[0]} for row in rows]
    chats = [{"prompt": [{"role": "user", "content": q["question"]}], **q} for q in questions]
    _write_rows(directory / "chats.jsonl", chats)
    write_data(directory)
    save_base(directory / "gpt2")
    save_encoder("roberta", directory / "roberta")
    write_task("sst2", directory / "sst2")
    common = f"--model_name_or_path {directory}/model --data_path {directory}/train.jsonl"
    sizes = "--lora_dim 4 --max_steps 3 --eval_iters 1 --per_device_train_batch_size 8"
    for name, stage in {"teacher": "step1_sft", "reward": "step2_reward"}.items():
        made = train(stage, f"{common} {sizes} --lora_learning_rate 2e-2")
        shutil.copytree(made / "adapter", directory / name)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


# ---------------------------------------------------------------------------- a server


@torch.no_grad()
def answer_to(model: PreTrainedModel, body: dict[str, Any]) -> dict[str, Any]:
    """A reply of vLLM's ``/v1/completions``: what the model draws by the request's seed."""
    generator = torch.Generator().manual_seed(body["seed"] % 2**63)
    tokens: list[int] = []
    logprobs: list[float] = []
    end = model.generation_config.eos_token_id
    while len(tokens) < body["max_tokens"] and end not in tokens:
        logits = model(torch.tensor([[*body["prompt"], *tokens]])).logits[0, -1]
        found = logits.log_softmax(-1)
        if body.get("top_k") == 1 or body.get("temperature") == 0:
            found = torch.where(found == found.max(), 0.0, -torch.inf)
        tokens.append(int(found.exp().multinomial(1, generator=generator)))
        logprobs.append(float(found[tokens[-1]]))
    choice = {
        "token_ids": tokens,
        "finish_reason": "stop" if end in tokens else "length",
        "logprobs": {"token_logprobs": logprobs},
    }
    return {"model": body["model"], "choices": [choice]}


@torch.no_grad()
def score_of(model: PreTrainedModel, tokens: Sequence[int]) -> dict[str, Any]:
    """A reply of vLLM's ``/v1/completions`` with the log-probabilities of a prompt's tokens."""
    found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    entries = [
        {str(token): {"logprob": float(found[place, token])}}
        for place, token in enumerate(tokens[1:])
    ]
    return {"choices": [{"prompt_logprobs": [None, *entries]}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "base", "max_model_len": 512}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "prompt_logprobs" in body:
            asked = body["prompt"]
            ids = self.tokenizer(asked).input_ids if isinstance(asked, str) else asked
            self._reply(score_of(self.model, ids))
        else:
            self._reply(answer_to(self.model, body) if self.path == "/v1/completions" else {})


@contextmanager
def rollout_server(path: Path) -> Iterator[str]:
    """The address of a server of the model or adapter at ``path``.

    It takes further adapters, and answers and scores prompts by its own model alone.
    """
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    handler = type("Handler", (_Handler,), {"model": model, "tokenizer": tokenizer})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
