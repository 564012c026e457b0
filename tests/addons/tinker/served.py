"""A server in a thread, its client as fixtures, and examples as the client sends them."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import numpy as np
import pytest
import tinker
from tinker import types

from addons.tinker.tinker_runs import NAME, service_of
from dschat_lora.addons.serving.endpoint.http_server import HttpServer
from dschat_lora.addons.tinker import service as service_module
from dschat_lora.addons.tinker.bases import open_base
from dschat_lora.addons.tinker.routes import make_app
from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.source import find_model

__all__ = ["address", "base", "client", "no_telemetry", "rest", "service"]
KEY = "tml-local"
TOKENS = [120, 41, 7, 300, 52, 9, 77]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="package", autouse=True)
def no_telemetry():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setattr(service_module, "LOST_PART_SECONDS", 0.5)
        patch.setattr(service_module, "LOST_SECONDS", 0.2)
        yield


@pytest.fixture(scope="package")
def base():
    return open_base(NAME, find_model(None), ModelConfig(dtype="fp32"), recomputes=False)


@contextmanager
def running(app):
    """The address at which an application is served by a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = HttpServer(app, timeout_graceful_shutdown=1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="package")
def service(base, tmp_path_factory):
    """Two bases of equal shapes; few adapters fit, so that others go to the disk meanwhile."""
    bases = {NAME: base, "twin": replace(base, name="twin")}
    started = service_of(bases, tmp_path_factory.mktemp("state"), max_adapters=2)
    started.start()
    yield started
    started.close()
    assert started.failure is None


@pytest.fixture(scope="package")
def address(service):
    with running(make_app(service, host="127.0.0.1", token=None)) as url:
        yield url


@pytest.fixture(scope="package")
def client(address):
    with tinker.ServiceClient(base_url=address, api_key=KEY) as own:
        yield own


@pytest.fixture(scope="package")
def rest(address):
    return tinker.RestClient(base_url=address, api_key=KEY)


def call(address, method, path, body=None, kind="application/json", headers=()):
    """(status, bytes) of a request; what is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {"Content-Type": kind, "X-API-Key": KEY, **dict(headers)}
    connection.request(method, f"/api/v1/{path}", content, names)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def new_trainer(client, **options):
    chosen = {"base_model": NAME, "rank": 4, "seed": 3, **options}
    return client.create_lora_training_client(**chosen).result()


def floats(values):
    return types.TensorData.from_numpy(np.array(values, dtype=np.float32))


def datum(tokens=TOKENS, targets=None, **inputs):
    targets = np.array([*tokens[1:], 5] if targets is None else targets, dtype=np.int64)
    inputs["target_tokens"] = types.TensorData.from_numpy(targets)
    return types.Datum(types.ModelInput.from_ints(list(tokens)), inputs)


def acted(tokens=TOKENS, **more):
    """An example of reinforcement learning."""
    advantages = [0.0, *[1.0] * (len(tokens) - 1)]
    inputs = {"logprobs": floats([-4.0] * len(tokens)), "advantages": floats(advantages)}
    return datum(tokens, **inputs | more)


def batch(step):
    """Examples of several lengths, others at each step."""
    rows = [[10 + step, *TOKENS[: 3 + (step + k) % 4]] for k in range(2)]
    return [datum(own, weights=floats([1.0] * len(own))) for own in rows]


def outputs_of(result):
    logprobs = [each["logprobs"].to_numpy().tolist() for each in result.loss_fn_outputs]
    return result.metrics["loss:sum"], logprobs


def trained(trainer, step):
    """What the requests of a step return."""
    outputs = outputs_of(trainer.forward_backward(batch(step), "cross_entropy").result())
    return *outputs, trainer.optim_step(ADAM).result().metrics["grad_norm"]


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens or TOKENS))
