"""A client of the Tinker API's service without HTTP, and runs of several processes."""

import json
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from dschat_lora.addons.tinker.adapters import OPTIMIZER_FILE
from dschat_lora.addons.tinker.bases import open_base
from dschat_lora.addons.tinker.losses import DatumLoss
from dschat_lora.addons.tinker.processes import follow
from dschat_lora.addons.tinker.service import TinkerService
from dschat_lora.addons.tinker.store import Store, parse_path
from dschat_lora.addons.tinker.worker import Worker
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.config.groups import ModelConfig
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.models.source import find_model

NAME = "base"
SCRIPT = Path(__file__).resolve().parents[3] / "dschat_lora" / "__main__.py"
ADAM = {"learning_rate": 1e-3, "eps": 1e-6, "weight_decay": 0.01, "grad_clip_norm": 20.0}


def service_of(bases, directory, *, tokens_per_device=16384, zero_stage=0, **options):
    """A service of bases by name."""
    store = Store(Path(directory))
    worker = Worker(bases, store, tokens_per_device=tokens_per_device, zero_stage=zero_stage)
    return TinkerService(worker, **options)


def started_server(launcher, home, port, **options):
    """The command, once it has said that it serves."""
    argv = ["tinker", "base", "--port", port, "--state_dir", home / "state"]
    server = launcher.start(argv, home, script=SCRIPT, **{"env": {"RANK": None}, **options})
    ends = time.monotonic() + 120
    while "Ctrl-C" not in server.out():
        assert time.monotonic() < ends, server.output()
        time.sleep(0.02)
    return server


def stopped_server(server, codes):
    server.signal(signal.SIGTERM)
    assert server.wait() == codes


class Client:
    """A client of one run, by the messages of the real client's package."""

    def __init__(self, service, number=0, *, session=None, **lora):
        self.service = service
        self.session = session or service.registry.create_session({})
        body = {"base_model": NAME, "lora_config": {"rank": 4, "seed": 3, **lora}}
        self.request_ids = [service.create_run(self.session, number, body)]
        self.run = self.request_ids[0].rpartition(":")[0]
        self.seq = 0

    def send(self, kind, body):
        self.seq += 1
        self.request_ids.append(self.service.submit(self.run, self.seq, kind, body))
        return self.request_ids[-1]

    def forward_backward(self, data, loss="cross_entropy", config=None, *, forward_only=False):
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(
                    data=data, loss_fn=loss, loss_fn_config=config
                ),
                model_id=self.run,
                seq_id=self.seq + 1,
            )
        )
        message.forward_only = forward_only
        return self.send("forward_backward", message.SerializeToString())

    def optim_step(self, **params):
        return self.send("optim_step", json.dumps({"adam_params": {**ADAM, **params}}).encode())

    def save(self, name, kind="save_weights"):
        return self.send(kind, json.dumps({"path": name}).encode())

    def load(self, path, *, optimizer):
        body = json.dumps({"path": path, "optimizer": optimizer}).encode()
        return self.send("load_weights", body)


def result(service, request_id):
    given = service.future(request_id).result(timeout=60)
    if given.media_type == "application/x-protobuf":
        return deserialize_forward_backward_output(given.body)
    return json.loads(given.body)


def values(service, path):
    weights = parse_path(path)
    return read_adapter(service.runs[weights.run].store.place(weights)).tensors


def rows(count, seed, loss="cross_entropy"):
    """Examples of random tokens; of a policy's losses the first tokens are a prompt."""
    draw = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(count):
        size = int(torch.randint(4, 20, (), generator=draw))
        tokens = torch.randint(4, 1000, (size + 1,), generator=draw).tolist()
        inputs = {"target_tokens": tokens[1:]}
        answer = torch.arange(size) >= 2
        if loss == "cross_entropy":
            inputs["weights"] = torch.randn(size, generator=draw)
        else:
            inputs["logprobs"] = -6 - torch.rand(size, generator=draw) * answer
            inputs["advantages"] = torch.randn(size, generator=draw) * answer
        data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
    return data


def endless(data, number=0):
    """The rows, one of which has a loss that is not finite."""
    data[number].loss_fn_inputs["logprobs"]._numpy[3] = -1e30
    data[number].loss_fn_inputs["advantages"]._numpy[3] = -1.0
    return data


KINDS = ({"rank": 4}, {"rank": 7, "train_mlp": False})


def train(directory, steps, **options):
    """Steps of two runs on a base, with all that can go wrong between them; call on every rank.

    Returns:
        On rank 0 what requests have given at each step, and the weights and moments.
    """
    base = open_base(NAME, find_model(None), ModelConfig(dtype="fp32"), recomputes=False)
    call = DatumLoss.__call__

    def full(loss, logprobs, numbers):
        if loss.name == "cispo" and rank() == world_size() - 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return call(loss, logprobs, numbers)

    DatumLoss.__call__ = full
    try:
        if rank() == 0:
            return _train(base, directory, steps, options)
        follow(Worker({NAME: base}, Store(Path(directory)), **options))
        return None
    finally:
        DatumLoss.__call__ = call


def _train(base, directory, steps, options):
    service = service_of({NAME: base}, directory, max_adapters=2, **options)
    registry = service.registry
    session = next(iter(registry.sessions), None) or registry.create_session({})
    clients = [Client(service, n, session=session, **kind) for n, kind in enumerate(KINDS)]
    for client in clients:
        client.seq = max(0, service.runs[client.run].done)
    service.start()
    given = [_step(service, session, clients, step) for step in steps]
    service.close()
    assert service.failure is None
    service.worker.channel.send()
    assert service.worker.passes_of_several > 0
    return given


def _step(service, session, clients, step):
    sent = []
    for number, client in enumerate(clients):
        seed = 10 * step + number
        sent.append(client.forward_backward(rows(5, seed)))
        # Of one example: the others have none.
        sent.append(client.forward_backward(rows(1, 50 + seed), forward_only=number == 1))
        sent.append(client.forward_backward(rows(3, seed, "dro"), "dro"))
    for number, client in enumerate(clients):
        sent.append(client.forward_backward(rows(2, number, "cispo"), "cispo"))
        sent.append(client.optim_step())
        broken = endless(rows(4, 4, "importance_sampling"), number)
        sent.append(client.forward_backward(broken, "importance_sampling"))
        broken[number].loss_fn_inputs["target_tokens"]._numpy[1] = 5000
        sent.append(client.forward_backward(broken, "importance_sampling"))
        sent.append(client.save(f"step{step}"))
        sent.append(client.forward_backward(rows(2, 99)))  # part of the next step
    outputs = [_plain(result(service, each)) for each in sent]
    paths = [f"tinker://{client.run}/weights/step{step}" for client in clients]
    sampler = service.registry.create_sampler(session, step, base=None, path=paths[0])
    asked = [service.sample(_question(sampler, n)) for n in range(5)]
    answers = [
        deserialize_sample_response(service.future(each).result(60).body) for each, _ in asked
    ]
    places = [service.store.place(path) for path in paths]
    return {
        "outputs": outputs,
        "answers": [[list(s.tokens), list(s.logprobs)] for a in answers for s in a.sequences],
        "prompts": [list(a.prompt_logprobs[1:]) for a in answers],
        "weights": [dict(read_adapter(place).tensors) for place in places],
        "moments": [load_file(place / OPTIMIZER_FILE) for place in places],
    }


def _plain(output):
    """What a request has given, in lists; the name of a run leaves out."""
    if isinstance(output, dict):
        plain = str(output.get("path", output)).rpartition("/")[2]
        return [*output["metrics"].values()] if "metrics" in output else plain
    logprobs = [each["logprobs"].to_numpy().tolist() for each in output.loss_fn_outputs]
    return [output.metrics["loss:sum"], logprobs]


def _question(sampler, number):
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7 + number]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 6, "seed": 5},
        "prompt_logprobs": True,
    }
