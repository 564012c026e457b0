"""The Tinker API as its own client sees it: what works, what is refused, kills, and repeats."""

import asyncio
import http.client
import json
import random
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.source import find_model
from helpers.spread import ALL

tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("uvicorn", reason="the extra [tinker] is not installed")

from tinker import types  # noqa: E402
from tinker.lib import internal_client_holder  # noqa: E402
from tinker.proto import tinker_public_pb2 as messages  # noqa: E402

from dschat_lora.addons.serving.endpoint.http_server import HttpServer  # noqa: E402
from dschat_lora.addons.tinker import service as service_module  # noqa: E402
from dschat_lora.addons.tinker.adapters import open_base  # noqa: E402
from dschat_lora.addons.tinker.server import make_app  # noqa: E402
from dschat_lora.addons.tinker.service import TinkerService  # noqa: E402
from dschat_lora.addons.tinker.store import Store  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
KEY = "tml-local"
TOKENS = [120, 41, 7, 300, 52, 9, 77]
ADAM = types.AdamParams(learning_rate=1e-2)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def no_telemetry():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setattr(service_module, "LOST_PART_SECONDS", 0.5)
        patch.setattr(service_module, "LOST_SECONDS", 0.2)
        yield


@pytest.fixture(scope="module")
def base():
    return open_base("base", find_model(None), ModelConfig(), recomputes=False)


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


@pytest.fixture(scope="module")
def service(base, tmp_path_factory):
    """Two bases of equal shapes; few adapters fit, so that others go to the disk meanwhile."""
    bases = {"base": base, "twin": replace(base, name="twin")}
    found = TinkerService(bases, Store(tmp_path_factory.mktemp("state")), max_adapters=2)
    found.start()
    yield found
    found.close()
    assert found.failure is None


@pytest.fixture(scope="module")
def address(service):
    with running(make_app(service, host="127.0.0.1", token=None)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    with tinker.ServiceClient(base_url=address, api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def rest(address):
    return tinker.RestClient(base_url=address, api_key=KEY)


def new_trainer(client, **options):
    chosen = {"base_model": "base", "rank": 4, "seed": 3, **options}
    return client.create_lora_training_client(**chosen).result()


def floats(values):
    return types.TensorData.from_numpy(np.array(values, dtype=np.float32))


def whole(values):
    return types.TensorData.from_numpy(np.array(values, dtype=np.int64))


def datum(tokens=TOKENS, targets=None, **inputs):
    targets = [*tokens[1:], 5] if targets is None else targets
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": whole(targets), **inputs},
    )


def weighted(tokens=TOKENS):
    return datum(tokens, weights=floats([1.0] * len(tokens)))


def acted(tokens=TOKENS, **changes):
    """An example of reinforcement learning."""
    count = len(tokens)
    inputs = {
        "logprobs": floats([-4.0] * count),
        "advantages": floats([0.0, *[1.0] * (count - 1)]),
        **changes,
    }
    return datum(tokens, **{name: each for name, each in inputs.items() if each is not None})


def batch(step):
    """Examples of several lengths, others at each step."""
    return [weighted([10 + step, *TOKENS[: 3 + (step + k) % 4]]) for k in range(2)]


def outputs_of(result):
    logprobs = [each["logprobs"].to_numpy().tolist() for each in result.loss_fn_outputs]
    return result.metrics["loss:sum"], logprobs


def trained(trainer, step, between=lambda: None):
    """What a step returns; something may come between its two requests."""
    sent = trainer.forward_backward(batch(step), "cross_entropy")
    found = outputs_of(sent.result())
    between()
    return *found, trainer.optim_step(ADAM).result().metrics["grad_norm"]


# What works


@pytest.mark.smoke
def test_a_loss_falls_and_equal_seeds_give_equal_numbers(client):
    trainers = [new_trainer(client, seed=seed) for seed in (1, 1, 2)]
    losses = []
    for _ in range(6):
        sent = [each.forward_backward(batch(0), "cross_entropy") for each in trainers]
        steps = [each.optim_step(ADAM) for each in trainers]
        losses.append([each.result().metrics["loss:sum"] for each in sent])
        assert all(each.result().metrics["grad_norm"] > 0 for each in steps)
    # A pass of several runs has another shape than one alone.
    assert losses[0] == pytest.approx([losses[0][0]] * 3, rel=1e-5)  # a new adapter is its base
    for one, same, other in losses[1:]:
        assert same == pytest.approx(one, rel=1e-3) != other
    assert all(last < first / 2 for first, last in zip(losses[0], losses[-1], strict=True))


@pytest.mark.smoke
def test_info_says_what_the_model_is(client, base):
    info = new_trainer(client, rank=2).get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("base", 2, True)
    assert info.model_data.tokenizer_id == base.source.tokenizer


@pytest.mark.parametrize(
    ("loss", "config", "extra"),
    [
        ("importance_sampling", None, {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}),
        ("cispo", None, {}),
        ("dro", {"beta": 0.1}, {}),
        ("gspo", None, {"sequence_ratio_mask": floats([0.0, *[1.0] * 6])}),
    ],
)
def test_each_loss_of_actions_gives_log_probabilities_and_a_gradient(client, loss, config, extra):
    trainer = new_trainer(client)
    data = [acted(**extra), acted(TOKENS[:4])]
    with_gradient = outputs_of(trainer.forward_backward(data, loss, config).result())
    alone = outputs_of(trainer.forward(data, loss, config).result())
    assert [len(each) for each in with_gradient[1]] == [7, 4]
    np.testing.assert_allclose(with_gradient[0], alone[0], rtol=1e-5)
    assert trainer.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_mask_of_one_example_does_not_depend_on_the_examples_beside_it(client):
    trainer = new_trainer(client)
    masked = acted(sequence_ratio_mask=floats([0.0, 0.0, *[1.0] * 5]))
    alone, plain, both = (
        trainer.forward(data, "gspo").result().metrics["loss:sum"]
        for data in ([masked], [acted()], [masked, acted()])
    )
    assert both == pytest.approx(alone + plain, rel=1e-5)
    assert alone != pytest.approx(plain, rel=1e-3)


def test_several_targets_of_a_position_come_dense_and_sparse(client):
    trainer = new_trainer(client)
    targets = np.array([[n + 2, 0, n + 5] for n in range(len(TOKENS))])
    weights = np.array([[0.5, 0.0, 0.25]] * len(TOKENS), dtype=np.float32)
    dense = datum(targets=targets, weights=floats(weights))
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch_sparse(torch.from_numpy(targets)),
            "weights": types.TensorData.from_torch_sparse(torch.from_numpy(weights)),
        },
    )
    found = [
        outputs_of(trainer.forward([each], "cross_entropy").result()) for each in (dense, sparse)
    ]
    assert found[0] == found[1]
    assert np.array(found[0][1][0]).shape == targets.shape


def test_a_custom_loss_has_the_gradient_of_the_loss_that_it_equals(client):
    one, other = new_trainer(client), new_trainer(client)

    def custom(data, logprobs):
        return -sum(each.sum() for each in logprobs), {"mine": 1.0}

    result = one.forward_backward_custom(batch(0), custom).result()
    assert result.metrics["mine"] == 1.0
    other.forward_backward(batch(0), "cross_entropy").result()
    norms = [each.optim_step(ADAM).result().metrics["grad_norm"] for each in (one, other)]
    assert norms[0] == norms[1]


def test_what_is_saved_goes_on_with_and_without_its_moments(client):
    trainer = new_trainer(client)
    trained(trainer, 0)
    path = trainer.save_state("half").result().path
    with_moments = client.create_training_client_from_state_with_optimizer(path).result()
    without = client.create_training_client_from_state(path).result()
    expected = [trained(trainer, step) for step in (1, 2)]
    assert [trained(with_moments, step) for step in (1, 2)] == expected
    first, second = (trained(without, step) for step in (1, 2))
    assert first == expected[0]  # before its step the factors are the same
    assert second != expected[1]
    trainer.load_state_with_optimizer(path).result()
    assert trained(trainer, 1) == expected[0]


def test_saved_weights_are_replaced_where_that_is_asked_for(client):
    trainer = new_trainer(client)
    trainer.save_state("same").result()
    trained(trainer, 0)
    with pytest.raises(tinker.RequestFailedError, match="path.*is there already; overwrite=True"):
        trainer.save_state("same").result()
    trainer.save_state("same", overwrite=True).result()
    assert trainer.save_state("same").result().path.endswith("weights/same")


def prompt(*tokens):
    return types.ModelInput.from_ints(list(tokens or TOKENS))


def test_samplers_answer_as_they_are_asked(client):
    trainer = new_trainer(client)
    trained(trainer, 0)
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(
        max_tokens=5, stop=[], seed=4, temperature=0.8, top_k=40, top_p=0.9
    )
    found = [sampler.sample(prompt(), 3, params).result().sequences for _ in range(2)]
    assert [each.tokens for each in found[0]] == [each.tokens for each in found[1]]
    assert len({tuple(each.tokens) for each in found[0]}) > 1
    assert all(each.stop_reason == "length" and len(each.tokens) == 5 for each in found[0])
    greedy = types.SamplingParams(max_tokens=4, stop=[], temperature=0.0)
    answer = sampler.sample(
        prompt(),
        1,
        greedy,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()
    (sequence,) = answer.sequences
    again = sampler.compute_logprobs(prompt(*TOKENS, *sequence.tokens)).result()
    assert again[0] is None
    np.testing.assert_allclose(again[1 : len(TOKENS)], answer.prompt_logprobs[1:], atol=1e-4)
    np.testing.assert_allclose(again[len(TOKENS) :], sequence.logprobs, atol=1e-4)
    assert [row[0][0] for row in sequence.topk_logprobs] == list(sequence.tokens)
    stop = [sequence.tokens[1]]
    cut = types.SamplingParams(max_tokens=4, stop=stop, temperature=0.0)
    (ended,) = sampler.sample(prompt(), 1, cut).result().sequences
    assert ended.stop_reason == "stop"
    assert list(ended.tokens) == list(sequence.tokens[: len(ended.tokens)])
    assert sampler.compute_logprobs(prompt(7)).result() == [None]
    long = [9, 7] * 256  # the whole context
    found = sampler.compute_logprobs(prompt(*long)).result()
    shorter = sampler.compute_logprobs(prompt(*long[:-1])).result()
    assert len(found) == 512
    np.testing.assert_allclose(found[1:-1], shorter[1:], atol=1e-4)


def test_a_long_prompt_and_a_long_answer_are_decoded_side_by_side(client, base):
    sampler = client.create_sampling_client(base_model="base").result()
    room = base.limit - 400
    sent = [
        sampler.sample(prompt(*[9] * 400), 1, types.SamplingParams(max_tokens=8, stop=[])),
        sampler.sample(prompt(), 1, types.SamplingParams(max_tokens=room + 20, stop=[])),
    ]
    assert [len(each.result().sequences[0].tokens) for each in sent] == [8, room + 20]


def test_the_lists_hold_what_was_made_and_what_is_deleted_leaves_them(client, rest, address):
    with tinker.ServiceClient(
        base_url=address, api_key=KEY, user_metadata={"who": "me"}, display_name="mine"
    ) as own:
        trainer = new_trainer(own, user_metadata={"a": "b"})
        path = trainer.save_state("kept", ttl_seconds=3600).result().path
        other = trainer.save_weights_for_sampler("for-sampler").result().path
        sampler = own.create_sampling_client(model_path=other).result()
        session = own.holder.get_session_id()
    assert sampler.get_base_model() == "base"
    run = trainer.model_id
    assert rest.list_training_runs(limit=1).result().training_runs[0].training_run_id == run
    shown = rest.get_training_run(run).result()
    assert (shown.lora_rank, shown.user_metadata) == (4, {"a": "b"})
    assert shown.last_checkpoint.tinker_path == path
    kept = rest.list_checkpoints(run).result().checkpoints
    assert [each.checkpoint_id for each in kept] == ["weights/kept", "sampler_weights/for-sampler"]
    assert kept[0].size_bytes > 0
    assert kept[0].expires_at is not None
    everyone = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert {path, other} <= {each.tinker_path for each in everyone}
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == ("base", 4, True)
    assert session in rest.list_sessions(limit=1000).result().sessions
    facts = rest.get_session(session).result()
    assert facts.training_run_ids == [run]
    assert facts.user_metadata == {"who": "me"}
    assert rest.get_sampler(facts.sampler_ids[0]).result().model_path == other
    models = rest.get_server_capabilities().result().supported_models
    assert [each.model_name for each in models] == ["base", "twin"]
    rest.delete_checkpoint(run, "weights/kept").result()
    rest.delete_checkpoint_from_tinker_path(other).result()
    assert rest.list_checkpoints(run).result().checkpoints == []


def test_files_of_external_weights_are_had_by_signed_urls_without_a_key(service):
    with running(make_app(service, host="127.0.0.1", token="tml-secret")) as guarded:
        named = {"base_url": guarded, "api_key": "tml-secret"}
        with tinker.ServiceClient(**named) as own:
            trainer = new_trainer(own)
            path = trainer.save_weights_external("out", ttl_seconds=3600).result().path
        rest = tinker.RestClient(**named)
        urls = rest.get_external_weights_urls(path).result().urls
        found = {name: urlopen(url).read() for name, url in urls.items()}
        for url in (urls["README.md"][:-1], urls["README.md"].replace("/files/1", "/files/2")):
            with pytest.raises(HTTPError, match="401"):
                urlopen(url)
        path_only = urlsplit(urls["README.md"]).path.removeprefix("/api/v1/")
        assert call(guarded, "GET", f"{path_only}%C3%A9", headers=[("X-API-Key", "no")])[0] == 401
        place = service.store.place(path)
        assert found.keys() >= {"adapter_model.safetensors", "adapter_config.json"}
        assert all((place / name).read_bytes() == each for name, each in found.items())
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        rest.publish_checkpoint_from_tinker_path(path).result()
        (kept,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
        assert (kept.checkpoint_type, kept.public, kept.expires_at) == ("external", True, None)
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
        (kept,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
        assert not kept.public
        assert kept.expires_at is not None


def test_weights_whose_time_is_over_are_no_more(client, rest):
    trainer = new_trainer(client)
    path = trainer.save_weights_for_sampler("short", ttl_seconds=1).result().path
    client.create_sampling_client(model_path=path).result()
    time.sleep(1.1)
    with pytest.raises(tinker.BadRequestError, match="model_path.*their time is over"):
        client.create_sampling_client(model_path=path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    trainer.save_weights_for_sampler("short").result()
    client.create_sampling_client(model_path=path).result()


# What is refused


@pytest.fixture(scope="module")
def expected(client):
    """The numbers of a training that nothing disturbs."""
    trainer = new_trainer(client)
    return [trained(trainer, step) for step in range(len(MISTAKES) + len(SENT))]


def raises(error):
    raise error


class Tenant:
    """Two clients who train, of whom one errs in the midst of a step."""

    def __init__(self, address, expected):
        self.address, self.expected, self.step = address, expected, 0
        self.client = tinker.ServiceClient(base_url=address, api_key=KEY)
        self.trainer = new_trainer(self.client)
        self.neighbour = tinker.ServiceClient(base_url=address, api_key=KEY)
        self.other = new_trainer(self.neighbour)
        self.state = self.trainer.save_state("early").result().path
        self.wide = new_trainer(self.client, rank=8).save_state("wide").result().path
        self.twin = new_trainer(self.client, base_model="twin").save_state("twin").result().path
        self.sampler = self.client.create_sampling_client(base_model="base").result()
        self.rest = tinker.RestClient(base_url=address, api_key=KEY)

    def err(self, wrong):
        """Do what is wrong within a step, or after it, and see that all numbers stay."""
        step, self.step = self.step, self.step + 1
        with ExitStack() as after:

            def tell():
                try:
                    wrong()
                except BaseException as error:  # noqa: BLE001 - told when the step has ended
                    after.callback(raises, error)

            assert trained(self.trainer, step, tell) == self.expected[step]
            assert trained(self.other, step) == self.expected[step]

    def sample(self, tokens=TOKENS, count=1, **options):
        inner = {
            name: options.pop(name)
            for name in ("max_tokens", "temperature", "top_p", "top_k", "stop")
            if name in options
        }
        params = types.SamplingParams(**{"max_tokens": 4, **inner})
        return self.sampler.sample(prompt(*tokens), count, params, **options).result()

    def learn(self, *data, loss="cross_entropy", config=None):
        return self.trainer.forward_backward(list(data), loss, config).result()

    def optimize(self, **params):
        return self.trainer.optim_step(types.AdamParams(**params)).result()

    def new(self, **options):
        return new_trainer(self.client, **options)


@pytest.fixture(scope="module")
def tenant(address, expected):
    return Tenant(address, expected)


FAILED, BAD, MISSING = tinker.RequestFailedError, tinker.BadRequestError, tinker.NotFoundError
NAN, COUNT = float("nan"), len(TOKENS)
PICTURE = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
ADVANTAGES = r"loss_fn_inputs\['advantages'\]"
TARGETS = r"data\[0\].loss_fn_inputs\['target_tokens'\]"


def learn(*data, **options):
    return lambda t: t.learn(*data, **options)


# By the client's exception: what it says, and what is done.
REFUSED = {
    BAD: {
        "base_model must be one of base, twin": lambda t: t.new(base_model="other"),
        "lora_config.rank must be from 1 to 128": lambda t: t.new(rank=0),
        "lora_config.rank must be from 1 to 128, .*got 129": lambda t: t.new(rank=129),
        "path: there are no weights": lambda t: t.client.create_training_client_from_state(
            f"{t.state}-2"
        ),
        "base_model must be one of": lambda t: t.client.create_sampling_client(base_model="other"),
        "model_path: there are no weights": lambda t: t.client.create_sampling_client(
            model_path=f"{t.state}-2"
        ),
        "prompt has the token 1024": lambda t: t.sample([1024]),
        "prompt has no tokens": lambda t: t.sampler.sample(
            types.ModelInput.from_ints([]), 1, types.SamplingParams(max_tokens=1)
        ),
        "prompt has 512 tokens": lambda t: t.sample([9] * 512),
        "sampling_params.max_tokens is 506": lambda t: t.sample(max_tokens=506),
        "sampling_params.max_tokens must be 1": lambda t: t.sample(max_tokens=0),
        "sampling_params.temperature must be": lambda t: t.sample(temperature=-1.0),
        "sampling_params.top_p must be": lambda t: t.sample(top_p=0.0),
        "sampling_params.top_k must be": lambda t: t.sample(top_k=-2),
        "sampling_params.stop must be": lambda t: t.sample(stop=[""]),
        "sampling_params.stop has the token 5000": lambda t: t.sample(stop=[5000]),
        "num_samples must be from 1": lambda t: t.sample(count=0),
        "topk_sample_logprobs must be from 0": lambda t: t.sample(topk_sample_logprobs=999),
        "limit and offset": lambda t: t.rest.list_training_runs(limit=-1),
    },
    FAILED: {
        r"data\[0\].model_input has the token 1024": learn(weighted([1, 1024])),
        r"data\[1\].model_input has the token -1": learn(weighted(), weighted([1, -1])),
        f"{TARGETS} has the token": learn(datum(targets=[2000] * COUNT)),
        f"{TARGETS} must have 7 entries": learn(datum(targets=[1, 2])),
        "loss_fn_inputs lacks 'target_tokens'": learn(
            types.Datum(model_input=prompt(), loss_fn_inputs={})
        ),
        "target_tokens.*whole numbers": learn(
            types.Datum(
                model_input=prompt(), loss_fn_inputs={"target_tokens": floats([1.5] * COUNT)}
            )
        ),
        rf"{ADVANTAGES} has the shape \[1\], and target_tokens \[7\]": learn(
            acted(advantages=floats([1.0])), loss="ppo"
        ),
        "lacks 'advantages', which ppo reads": learn(acted(advantages=None), loss="ppo"),
        r"loss_fn_inputs\['logprobs'\] has the shape": learn(
            acted(logprobs=floats([[-1.0] * COUNT])), loss="cispo"
        ),
        f"{ADVANTAGES} holds NaN": learn(
            acted(advantages=floats([NAN] * COUNT)), loss="importance_sampling"
        ),
        r"loss_fn_inputs\['weights'\] holds NaN or infinity": learn(
            datum(weights=floats([np.inf] * COUNT))
        ),
        r"loss_fn_inputs\['weights'\] has the shape": learn(datum(weights=floats([1.0]))),
        "loss_fn stable_reinforce": learn(acted(), loss="stable_reinforce"),
        "of ppo takes clip_low_threshold, clip_high_threshold, got 'clip'": learn(
            acted(), loss="ppo", config={"clip": 0.2}
        ),
        r"loss_fn_config\['beta'\] must be a number >= 0": learn(
            acted(), loss="dro", config={"beta": -1.0}
        ),
        r"loss_fn_config\['beta'\] must be a number": learn(
            acted(), loss="dro", config={"beta": NAN}
        ),
        r"loss_fn_config\['beta'\] must be a number, got 'much'": learn(
            acted(), loss="dro", config={"beta": "much"}
        ),
        r"data\[0\].model_input has 513 tokens, and base has 512 positions": learn(
            weighted([9] * 513)
        ),
        "has 'mask', which ppo does not read": learn(acted(mask=floats([1.0] * COUNT)), loss="ppo"),
        "target_tokens'.*which cross_entropy alone takes": learn(
            acted(target_tokens=whole([[1, 2]] * COUNT)), loss="importance_sampling"
        ),
        r"data\[0\].model_input has a chunk of image": learn(
            types.Datum(
                model_input=types.ModelInput(chunks=[PICTURE]),
                loss_fn_inputs={"target_tokens": whole([1])},
            )
        ),
        r"data\[0\].model_input has no tokens": learn(weighted([])),
        r"adam_params.learning_rate must be in \[0": lambda t: t.optimize(learning_rate=-1.0),
        "adam_params.learning_rate must be finite": lambda t: t.optimize(learning_rate=NAN),
        "adam_params.learning_rate must be in": lambda t: t.optimize(learning_rate=1e300),
        r"adam_params.beta1 must be in \[0, 1\)": lambda t: t.optimize(beta1=1.0),
        "adam_params.grad_clip_norm must be in": lambda t: t.optimize(grad_clip_norm=-1.0),
        "optimizer_params: AdamW alone": lambda t: t.trainer.optim_step(
            types.DimuonParams(learning_rate=1e-3)
        ),
        "path must be a name of letters": lambda t: t.trainer.save_state("../../x"),
        "path must be a name of .*got '..'": lambda t: t.trainer.save_state(".."),
        "path must be a name of .*got '.unnamed": lambda t: t.trainer.save_weights_for_sampler(
            ".unnamed-x"
        ),
        "path must be a name of .*got 'xxx": lambda t: t.trainer.save_state("x" * 300),
        "ttl_seconds must be from 1": lambda t: t.trainer.save_state("x", ttl_seconds=0),
        "ttl_seconds must be from 1 to 2147483647": lambda t: t.trainer.save_state(
            "x", ttl_seconds=10**20
        ),
        "age_encryption_recipients is not built here": lambda t: t.trainer.save_weights_external(
            "x", age_encryption_recipients=["age1"]
        ),
        "path: there are no weights": lambda t: t.trainer.load_state(
            f"tinker://{t.trainer.model_id}/weights/.."
        ),
        "path must be like tinker://RUN/weights/NAME": lambda t: t.trainer.load_state(
            "/etc/passwd"
        ),
        "another rank": lambda t: t.trainer.load_state(t.wide),
        "path: the weights are of twin, and the model is of base": lambda t: (
            t.trainer.load_state_with_optimizer(t.twin)
        ),
    },
    UnicodeEncodeError: {"surrogates": lambda t: t.trainer.save_state("\ud800")},
    MISSING: {
        "path: there is no model 'x'": lambda t: t.client.create_training_client_from_state(
            "tinker://x/weights/y"
        ),
        "no model 'x'": lambda t: t.rest.get_training_run("x"),
        "has no weights/none": lambda t: t.rest.delete_checkpoint(
            t.trainer.model_id, "weights/none"
        ),
        "no session 'x'": lambda t: t.rest.get_session("x"),
        "no sampler 'x'": lambda t: t.rest.get_sampler("x"),
        "tinker_path: there is no model 'x'": lambda t: t.rest.get_weights_info_by_tinker_path(
            "tinker://x/weights/y"
        ),
        "copy_weights is not built here": lambda t: t.rest.copy_weights(t.state, "project"),
    },
}


MISTAKES = [(error, *each) for error, group in REFUSED.items() for each in group.items()]


@pytest.mark.parametrize(("error", "said", "act"), MISTAKES[:: 1 if ALL else 6])
def test_a_mistake_is_told_by_its_field_and_changes_no_number(tenant, error, said, act):
    def wrong():
        with pytest.raises(error, match=said):
            getattr(act(tenant), "result", tuple)()

    tenant.err(wrong)


def test_a_step_without_a_gradient_and_a_loss_that_is_not_finite_are_told(client):
    trainer = new_trainer(client)
    with pytest.raises(FAILED, match="optim_step needs a gradient"):
        trainer.optim_step(ADAM).result()
    far = acted(logprobs=floats([-300.0] * COUNT))
    with pytest.raises(FAILED, match="the loss is not finite"):
        trainer.forward_backward([far], "importance_sampling").result()
    ignored = acted(logprobs=floats([-300.0, *[-4.0] * 6]))  # an advantage of 0 has no ratio
    trainer.forward_backward([ignored], "importance_sampling").result()
    assert np.isfinite(trainer.optim_step(ADAM).result().metrics["grad_norm"])


def call(address, method, path, body=None, kind="application/json", headers=()):
    """(status, bytes) of a request; what is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    names = {"Content-Type": kind, "X-API-Key": KEY, **dict(headers)}
    connection.request(method, f"/api/v1/{path}", content, names)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def message(trainer, seq=1, **changes):
    """The bytes of forward_backward."""
    found = messages.ForwardBackwardRequest(
        model_id=trainer.model_id, seq_id=seq, loss_fn="cross_entropy"
    )
    one = found.data.add()
    one.model_input.add().encoded_text.tokens = changes.get("tokens", b"\1\0\0\0\2\0\0\0")
    tensor = one.loss_fn_inputs["target_tokens"]
    tensor.dtype = messages.DTYPE_INT64
    if "sparse" in changes:
        shape, values, rows, columns = changes["sparse"]
        tensor.shape.extend(shape)
        tensor.sparse_csr.values = np.array(values, np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    else:
        tensor.dense = changes.get("targets", np.array([1, 2]).tobytes())
        tensor.shape.extend(changes.get("shape", [2]))
        tensor.dtype = changes.get("dtype", messages.DTYPE_INT64)
    return found.SerializeToString()


def asked(t, **changes):
    return {
        "sampling_session_id": t.sampler._sampling_session_id,
        "seq_id": 10**6,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
        **changes,
    }


def targets_of(shape, data):
    return {"target_prompt_logprobs": {"dtype": "int64", "shape": shape, "data": data}}


def lora(t, **changes):
    session = t.client.holder.get_session_id()
    return {
        "session_id": session,
        "model_seq_id": 10**6,
        "base_model": "base",
        "lora_config": {"rank": 2},
        **changes,
    }


# By path and status: what the answer says, and what is sent as it is.
RAW = {
    ("forward_backward", 400): {
        "no protobuf message": lambda t: b"\xff" * 9,
        "seq_id must be": lambda t: message(t.trainer, 0),
    },
    ("optim_step", 404): {"no model 'x'": lambda t: {"model_id": "x", "seq_id": 1}},
    ("optim_step", 400): {
        "seq_id is missing": lambda t: {"model_id": t.trainer.model_id},
        "seq_id must be at most": lambda t: {"model_id": t.trainer.model_id, "seq_id": 10**400},
        "seq_id must be a whole number": lambda t: {"model_id": t.trainer.model_id, "seq_id": "5"},
        "the body is no JSON": lambda t: b"{",
        "the body must be an object": lambda t: [],
    },
    ("create_session", 400): {
        "the body is no JSON": lambda t: b"[" * 10**5,
        "sdk_version is '0.39.0', and this server speaks the protocol of tinker 0.38": lambda t: {
            "sdk_version": "0.39.0"
        },
        "user_metadata must have texts alone": lambda t: {"user_metadata": {"a": 1}},
    },
    ("create_model", 400): {
        "user_metadata must have texts alone": lambda t: lora(t, user_metadata={"a": 1}),
        "model_seq_id must be": lambda t: lora(t, model_seq_id=-1),
        "optimizer_config must be adamw": lambda t: lora(
            t, optimizer_config={"type": "dimuon", "version": 1}
        ),
        "lora_config.alpha is not known": lambda t: lora(t, lora_config={"rank": 2, "alpha": 3}),
        "train_mlp, train_attn and train_unembed are all false": lambda t: lora(
            t,
            lora_config={
                "rank": 2,
                **dict.fromkeys(("train_mlp", "train_attn", "train_unembed"), False),
            },
        ),
    },
    ("create_model", 404): {"no session 'x'": lambda t: lora(t, session_id="x")},
    ("session_heartbeat", 400): {"session_id must be a text": lambda t: {"session_id": []}},
    ("retrieve_future", 410): {"nothing is known of": lambda t: {"request_id": "x"}},
    ("load_weights", 400): {
        "base_model is 'twin', and the weights are of base": lambda t: lora(
            t, path=t.state, base_model="twin"
        )
    },
    ("asample", 400): {
        "seq_id must be": lambda t: asked(t, seq_id=None),
        "target_prompt_logprobs has": lambda t: asked(t, **targets_of([2, 1], ["a", "b"])),
        "target_prompt_logprobs must have the shape": lambda t: asked(
            t, **targets_of([2.0, 1.0], [1, 2, 3])
        ),
        "prompt has the token 1000": lambda t: asked(t, prompt={"chunks": [{"tokens": [10**30]}]}),
        "sampling_params.temperature must be finite": lambda t: asked(
            t, sampling_params={"temperature": 10**400}
        ),
    },
    ("nothing", 404): {"is not built here": lambda t: {}},
}


SENT = [(*where, *each) for where, group in RAW.items() for each in group.items()]


@pytest.mark.parametrize(("path", "status", "said", "body"), SENT[:: 1 if ALL else 3])
def test_a_malformed_request_is_refused_and_changes_no_number(tenant, path, status, said, body):
    def wrong():
        content = body(tenant)
        kind = "application/x-protobuf" if path == "forward_backward" else "application/json"
        found, text = call(tenant.address, "POST", path, content, kind)
        assert (found, said in json.loads(text)["detail"]) == (status, True), text

    tenant.err(wrong)


MALFORMED = {
    "half a token": ({"tokens": b"\1\0\0"}, "model_input has a chunk of 3 bytes"),
    "half a number": ({"targets": b"\1\0\0"}, "target_tokens'] does not fill the shape"),
    "shape": ({"shape": [2, 2**62]}, "does not fill the shape"),
    "negative shape": ({"shape": [-3]}, "does not fill the shape"),
    "type": ({"dtype": 4}, "dtype that is not known"),
    "sparse line": ({"sparse": ([2], [1], [0, 1], [0])}, "a sparse one has 2 dimensions"),
    "sparse and huge": ({"sparse": ([2, 2**60], [1], [0, 1, 1], [0])}, "at most 67,108,864"),
    "rows that are none": ({"sparse": ([2, 2], [1], [0, 5], [0])}, "crow_indices do not count"),
    "rows that go back": ({"sparse": ([2, 2], [1], [0, 2, 1], [0])}, "crow_indices do not count"),
    "endless rows": ({"sparse": ([2, 2], [1], [0, 2**60, 2**60], [0])}, "col_indices do not name"),
    "negative column": ({"sparse": ([2, 2], [1], [0, 1, 1], [-1])}, "col_indices do not name"),
    "column beyond": ({"sparse": ([2, 2], [1], [0, 1, 1], [2])}, "does not fill the shape"),
}


def test_malformed_tensors_are_refused_in_their_turn(client, address):
    trainer = new_trainer(client)
    for seq, (changes, said) in enumerate(MALFORMED.values(), start=1):
        body = message(trainer, seq, **changes)
        status, text = call(address, "POST", "forward_backward", body, "application/x-protobuf")
        assert status == 200, text
        status, text = call(address, "POST", "retrieve_future", json.loads(text))
        found = json.loads(text)
        assert (status, found["category"]) == (200, "user")
        assert said in found["error"], (changes, found)


def test_a_number_that_is_lost_holds_nothing_up_for_good(client, address):
    trainer = new_trainer(client)
    _, text = call(
        address, "POST", "forward_backward", message(trainer, 3), "application/x-protobuf"
    )
    assert call(address, "POST", "retrieve_future", json.loads(text))[0] == 200
    late = call(address, "POST", "forward_backward", message(trainer, 2), "application/x-protobuf")
    assert call(address, "POST", "retrieve_future", json.loads(late[1]))[0] == 410


def test_another_version_of_the_client_and_a_wrong_key_are_told_at_once(
    service, address, monkeypatch
):
    with running(make_app(service, host="127.0.0.1", token="tml-secret")) as guarded:
        wrong = tinker.ServiceClient(base_url=guarded, api_key="tml-other")
        with pytest.raises(tinker.AuthenticationError, match="token is missing or wrong"):
            new_trainer(wrong)
        with tinker.ServiceClient(base_url=guarded, api_key="tml-secret") as right:
            new_trainer(right)
    monkeypatch.setattr(internal_client_holder, "tinker_sdk_version", "0.39.1")
    with pytest.raises(tinker.BadRequestError, match=r"sdk_version is '0.39.1'"):
        new_trainer(tinker.ServiceClient(base_url=address, api_key=KEY))


def test_a_failed_request_is_not_part_of_gradients_that_are_made_anew(client, base):
    one, other = new_trainer(client), new_trainer(client)
    one.forward_backward(batch(0), "cross_entropy").result()
    with pytest.raises(FAILED, match="model_input has the token"):
        one.forward_backward([weighted([4000])], "cross_entropy").result()
    for _ in range(3):  # the adapter goes to the disk
        trained(new_trainer(client, rank=1), 0)
    found = one.optim_step(ADAM).result().metrics
    other.forward_backward(batch(0), "cross_entropy").result()
    assert found == other.optim_step(ADAM).result().metrics


def test_a_full_disk_fails_one_step_which_can_be_taken_again(client, service, monkeypatch):
    one, other = new_trainer(client), new_trainer(client)
    run = service.runs[one.model_id]

    def full(*args):
        raise OSError("no space")

    one.forward_backward(batch(0), "cross_entropy").result()
    with monkeypatch.context() as patch:
        patch.setattr(run.store, "write_state", full)
        with pytest.raises(FAILED, match="optim_step failed: OSError"):
            one.optim_step(ADAM).result()
    expected = trained(other, 0)
    assert one.optim_step(ADAM).result().metrics["grad_norm"] == expected[2]
    assert trained(one, 1) == trained(other, 1)


# Repeats and kills


class Doubling:
    """Sends requests twice or thrice, at once or later, in any order."""

    def __init__(self, app, seed):
        self._app, self._random, self._kept = app, random.Random(seed), []
        self.count = 0

    async def __call__(self, scope, receive, send):
        body = b""
        while scope["type"] == "http":
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        path = scope["path"]
        if scope["method"] == "POST" and "session" not in path and "retrieve" not in path:
            self._kept.append((scope, body))
        again = self._random.choices(self._kept, k=2) if self._kept else []
        if self._kept and self._random.random() < 0.7:
            again.append(self._kept[-1])
        self.count += len(again)
        calls = [self._call(*each, None) for each in again]
        calls.insert(self._random.randint(0, len(calls)), self._call(scope, body, send))
        await asyncio.gather(*calls)

    async def _call(self, scope, body, send):
        sent = False

        async def receive():
            nonlocal sent
            if sent:
                await asyncio.sleep(3600)
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def drop(part):
            pass

        await self._app(dict(scope), receive, send or drop)


def whole_training(client, name, strike=lambda n: None, **options):
    """A training in which a strike can come at five moments; its numbers, and where it is."""
    trainer = new_trainer(client, **options)
    strike(0)
    found = []
    for step in range(3):
        sent = trainer.forward_backward(batch(step), "cross_entropy")
        if step == 0:
            strike(1)  # in the midst of it
        found.append(outputs_of(sent.result()))
        if step == 1:
            strike(2)  # between both
        taken = trainer.optim_step(ADAM)
        if step == 1:
            strike(3)
        found.append(taken.result().metrics)
    saved = trainer.save_state(name)
    strike(4)
    saved.result()
    return trainer, found


def files_of(state, trainer, name):
    place = state / "runs" / trainer.model_id.replace(":", "_") / "weights" / name
    return [
        (place / f).read_bytes() for f in ("adapter_model.safetensors", "optimizer.safetensors")
    ]


@pytest.mark.parametrize("seed", range(20 if ALL else 1))
def test_requests_that_come_again_are_applied_once(base, tmp_path, client, service, seed):
    expected, numbers = whole_training(client, "end")
    own = TinkerService({"base": base}, Store(tmp_path), max_adapters=1)
    own.start()
    app = Doubling(make_app(own, host="127.0.0.1", token=None), seed)
    with running(app) as address:
        with tinker.ServiceClient(base_url=address, api_key=KEY) as doubled:
            trainer, found = whole_training(doubled, "end")
            sampler = trainer.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=3)
            assert len(sampler.sample(prompt(), 2, params).result().sequences) == 2
        assert app.count > 20
    own.close()
    assert own.failure is None
    assert found == numbers
    assert files_of(tmp_path, trainer, "end") == files_of(service.store.directory, expected, "end")
    assert len(own.runs) == 1
    assert (
        len((own.runs[trainer.model_id].store.directory / "metrics.jsonl").read_text().splitlines())
        == 3
    )


@pytest.mark.stage
def test_a_server_that_is_killed_goes_on_where_it_was(launcher, tmp_path, client, service):
    expected, numbers = whole_training(client, "end")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state, running_now, struck = tmp_path / "state", [], []

    def start():
        argv = ["tinker", "base", "--port", port, "--state_dir", state]
        script = ROOT / "dschat_lora" / "__main__.py"
        running_now.append(launcher.start(argv, tmp_path, script=script, env={"RANK": None}))
        ends = time.monotonic() + 60
        while "Ctrl-C" not in running_now[-1].out():
            assert time.monotonic() < ends, running_now[-1].output()
            time.sleep(0.02)

    def strike(moment):
        time.sleep(0.05)  # what was sent is under way
        running_now[-1].kill()
        running_now[-1].wait()
        struck.append(moment)
        start()

    start()
    own = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
    trainer, found = whole_training(own, "end", strike, base_model=find_model(None).base)
    own.close("success")
    running_now[-1].signal(signal.SIGTERM)
    assert running_now[-1].wait() == [0]
    assert struck == [0, 1, 2, 3, 4]
    assert found == numbers
    assert files_of(state, trainer, "end") == files_of(service.store.directory, expected, "end")
