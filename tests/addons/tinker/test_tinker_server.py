"""The Tinker API as its own client sees it: what works, repeats and kills."""

import socket
import time
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

for each in ("tinker", "uvicorn"):
    pytest.importorskip(each, reason="the extra [tinker] is not installed")

import numpy as np
import tinker
import torch
from tinker import types
from tinker.lib import internal_client_holder

from addons.tinker.served import (
    ADAM,
    KEY,
    TOKENS,
    acted,
    batch,
    call,
    datum,
    floats,
    new_trainer,
    outputs_of,
    prompt,
    running,
    trained,
)
from addons.tinker.tinker_runs import started_server, stopped_server
from dschat_lora.addons.tinker.routes import make_app
from dschat_lora.models.source import find_model

FAILED = tinker.RequestFailedError
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.smoke
def test_a_loss_falls_and_equal_seeds_give_equal_numbers(client, base):
    trainers = [new_trainer(client, seed=seed) for seed in (1, 1, 2)]
    info = trainers[0].get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == ("base", 4, True)
    assert info.model_data.tokenizer_id == base.source.tokenizer
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
    inputs = {"target_tokens": targets, "weights": weights}
    sparse = {
        name: types.TensorData.from_torch_sparse(torch.from_numpy(each))
        for name, each in inputs.items()
    }
    dense, other = (
        outputs_of(trainer.forward([each], "cross_entropy").result())
        for each in (datum(targets=targets, weights=floats(weights)), types.Datum(prompt(), sparse))
    )
    assert dense == other
    assert np.array(dense[1][0]).shape == targets.shape


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


def test_samplers_answer_as_they_are_asked(client):
    trainer = new_trainer(client)
    trained(trainer, 0)
    sampler = trainer.save_weights_and_get_sampling_client()
    params = types.SamplingParams(
        max_tokens=5, stop=[], seed=4, temperature=0.8, top_k=40, top_p=0.9
    )
    outcome = [sampler.sample(prompt(), 3, params).result().sequences for _ in range(2)]
    assert [each.tokens for each in outcome[0]] == [each.tokens for each in outcome[1]]
    assert len({tuple(each.tokens) for each in outcome[0]}) > 1
    assert all(each.stop_reason == "length" and len(each.tokens) == 5 for each in outcome[0])
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
    outcome = sampler.compute_logprobs(prompt(*long)).result()
    shorter = sampler.compute_logprobs(prompt(*long[:-1])).result()
    assert len(outcome) == 512
    np.testing.assert_allclose(outcome[1:-1], shorter[1:], atol=1e-4)


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
        outcome = {name: urlopen(url).read() for name, url in urls.items()}
        for url in (urls["README.md"][:-1], urls["README.md"].replace("/files/1", "/files/2")):
            with pytest.raises(HTTPError, match="401"):
                urlopen(url)
        path_only = urlsplit(urls["README.md"]).path.removeprefix("/api/v1/")
        assert call(guarded, "GET", f"{path_only}%C3%A9", headers=[("X-API-Key", "no")])[0] == 401
        place = service.store.place(path)
        assert outcome.keys() >= {"adapter_model.safetensors", "adapter_config.json"}
        assert all((place / name).read_bytes() == each for name, each in outcome.items())
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


def test_a_failed_request_is_not_part_of_gradients_that_are_made_anew(client):
    one, other = new_trainer(client), new_trainer(client)
    one.forward_backward(batch(0), "cross_entropy").result()
    with pytest.raises(FAILED, match="model_input has the token"):
        one.forward_backward([datum([4000])], "cross_entropy").result()
    for _ in range(3):  # the adapter goes to the disk
        trained(new_trainer(client, rank=1), 0)
    outcome = one.optim_step(ADAM).result().metrics
    other.forward_backward(batch(0), "cross_entropy").result()
    assert outcome == other.optim_step(ADAM).result().metrics


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


def whole_training(client, strike=lambda n: None, **options):
    """A training in which a strike can come at five moments; its numbers, and where it is."""
    trainer = new_trainer(client, **options)
    strike(0)
    numbers = []
    for step in range(3):
        sent = trainer.forward_backward(batch(step), "cross_entropy")
        if step == 0:
            strike(1)  # in the midst of it
        numbers.append(outputs_of(sent.result()))
        if step == 1:
            strike(2)  # between both
        taken = trainer.optim_step(ADAM)
        if step == 1:
            strike(3)
        numbers.append(taken.result().metrics)
    saved = trainer.save_state("end")
    strike(4)
    saved.result()
    return trainer, numbers


def files_of(state, trainer):
    place = state / "runs" / trainer.model_id.replace(":", "_") / "weights" / "end"
    return [
        (place / f).read_bytes() for f in ("adapter_model.safetensors", "optimizer.safetensors")
    ]


@pytest.mark.stage
def test_a_server_that_is_killed_goes_on_where_it_was(launcher, tmp_path, client, service):
    expected, numbers = whole_training(client)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    struck, servers = [], [started_server(launcher, tmp_path, port)]

    def strike(moment):
        time.sleep(0.05)  # what was sent is under way
        servers[-1].kill()
        servers[-1].wait()
        struck.append(moment)
        servers.append(started_server(launcher, tmp_path, port))

    own = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
    trainer, outcome = whole_training(own, strike, base_model=find_model(None).base)
    own.close("success")
    stopped_server(servers[-1], [0])
    assert struck == [0, 1, 2, 3, 4]
    assert outcome == numbers
    assert files_of(tmp_path / "state", trainer) == files_of(service.store.directory, expected)
