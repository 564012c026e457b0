"""Runs on the bundled model that say different things, and servers of them in this process."""

import http.client
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.export import save_adapter
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.slots import SlotRows
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.loading import load_tokenizer, share_parameters
from dschat_lora.models.source import find_model

CARD = {"data": {"training data": "random"}, "metrics": {}, "versions": {}}
QUESTIONS = (
    "What is the opposite of hot?",
    "What is 2 plus 3?",
    "I am Gina. Name a fruit, please.",
)


def write_run(directory, *, seed, reward=False, base=None, lora=None, std=0.02, **base_of):
    """An output directory whose adapter changes what a model says; returns it.

    ``base`` is the bundled model by default, and ``base_of`` are its notes on it, for
    :func:`save_adapter`. ``std`` is that of the factors B of ``lora``, by default of rank 4.
    """
    base = None if base is None else str(base)
    source, options = find_model(base), ModelConfig(model_name_or_path=base)
    tokenizer = load_tokenizer(source.tokenizer, options)
    lora = lora or LoraConfig(lora_dim=4)
    build = build_reward_model if reward else build_causal_lm
    adapted = build(source, tokenizer, options, lora, dtype=torch.float32, seed=seed, meta=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=std, generator=generator)
    save_adapter(
        Path(directory) / "adapter",
        adapted.model,
        adapted.lora,
        base=source.base,
        tokenizer=tokenizer,
        card=CARD,
        task_type=adapted.task,
        **base_of,
    )
    return Path(directory)


def peft_greedy(run, prompt, count):
    """What stock PEFT and transformers generate after a text; ``run`` None is the base."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL).eval()
    if run is not None:
        model = PeftModel.from_pretrained(model, Path(run) / "adapter").eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def endless(model):
    """The base, alone in a batch of its own, which no token ends."""
    from dschat_lora.addons.serving.models import BaseBatch

    base = model.batch.base
    rows = SlotRows(share_parameters(base), pad_id=int(model.tokenizer.pad_token_id))
    batch = BaseBatch(base, rows, model.batch.limit)
    return replace(model, name="endless", batch=batch, adapter=0, end_ids=frozenset())


def on_endless(service, rows=4, queue=9):
    """The service with a decoder and a model of its own, whose answers do not end."""
    from dschat_lora.addons.serving.decoder import AnswerDecoder

    model = endless(service.models["base"])
    decoder = AnswerDecoder([model.batch], max_batch_size=rows, max_queue=queue)
    return replace(service, models={"endless": model}, decoder=decoder)


@contextmanager
def running_server(service):
    """Within, a server of the service; gives its address."""
    from dschat_lora.addons.serving.endpoint.sockets import address_of, listen
    from dschat_lora.addons.serving.server import Server

    with listen("127.0.0.1", 0) as listening:
        server = Server(service)
        service.decoder.start()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield address_of(listening)
        finally:
            service.decoder.close()
            server.should_exit = True
            thread.join()
            service.decoder.join()


def served(*models, **options):
    """The same of models that ``dschat-lora serve`` opens; skips the test without the add-on."""
    server = pytest.importorskip("dschat_lora.addons.serving.server", reason="no add-on serving")
    from dschat_lora.addons.serving.config import ServeConfig

    config = ServeConfig(models=tuple(map(str, models)), **options)
    return running_server(server.make_service(config, BUNDLED_MODEL / "unused.jsonl"))


def send(address, method, path, body=None, headers=()):
    """(status, JSON) of a request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    kind = {} if body is None else {"Content-Type": "application/json"}
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, {**kind, **dict(headers)})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


def refused(status, answer):
    """The message of an error in OpenAI's form: one line, no traceback."""
    assert 400 <= status < 500, (status, answer)
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    message = answer["error"]["message"]
    assert message
    assert "\n" not in message
    assert len(message) < 1000
    assert "Traceback" not in message
    return message


def check_answers(address):
    """A plain request is answered."""
    body = {"model": "a", "prompt": "Hi", "max_tokens": 1}
    status, answer = send(address, "POST", "/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 1
    assert send(address, "GET", "/healthz")[1]["status"] == "ok"
