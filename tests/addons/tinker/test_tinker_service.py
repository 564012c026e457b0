"""The Tinker API's service without HTTP: numbers, order, restarts and many runs on one base."""

import json
import random

import pytest

for each in ("tinker", "uvicorn"):
    pytest.importorskip(each, reason="the extra [tinker] is not installed")

import torch
from peft import PeftModel
from tinker import types
from tinker.proto.response_conv import deserialize_sample_response
from transformers import AutoModelForCausalLM

from addons.tinker.tinker_runs import NAME, Client, endless, result, rows, service_of, values
from dschat_lora.addons.serving.endpoint.errors import BusyError
from dschat_lora.addons.tinker.requests import NotFoundError
from dschat_lora.addons.tinker.store import parse_path
from dschat_lora.models.source import find_model
from helpers.spread import ALL


@pytest.fixture
def start(base, tmp_path):
    services = []

    def started(directory="state", **options):
        home, aliases = tmp_path / directory, {"short": NAME}
        service = service_of({NAME: base}, home, aliases=aliases, **options)
        service.start()
        services.append(service)
        return service

    yield started
    for service in services:
        service.close()


def by_hand(loss, logprobs, numbers, config):
    """The loss of an example, as the formula reads."""
    if loss == "cross_entropy":
        return -(logprobs * numbers["weights"]).sum()
    old, advantages = numbers["logprobs"], numbers["advantages"]
    ratio = (logprobs - old).exp()
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "dro":
        penalty = config["beta"] / 2 * (logprobs - old) ** 2
        return -(logprobs * advantages - penalty)[advantages != 0].sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if loss == "cispo":
        return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
    if loss == "gspo":
        answer = advantages != 0
        mean = (logprobs - old)[answer].mean().detach().exp()
        ratio = mean * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
        ("cispo", {"clip_low_threshold": 0.2, "clip_high_threshold": 2.0}),
        ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 3.0}),
        ("dro", {"beta": 0.3}),
    ][:: 1 if ALL else 2],
)
def test_losses_and_steps_are_those_of_a_plain_loop_with_peft(start, loss, config):
    service = start()
    client = Client(service)
    first = result(service, client.save("first"))["path"]
    saved = service.runs[client.run].store.place(parse_path(first))
    plain = AutoModelForCausalLM.from_pretrained(find_model(None).base, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, saved, is_trainable=True).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    for step in range(3):
        data = rows(5, step, loss)
        # Gradients of two requests are added.
        halves = [client.forward_backward(part, loss, config) for part in (data[:2], data[2:])]
        stepped = client.optim_step()
        outcome = [result(service, each) for each in halves]
        total, outputs = 0.0, [each for half in outcome for each in half.loss_fn_outputs]
        for datum, output in zip(data, outputs, strict=True):
            ids = torch.tensor([datum.model_input.to_ints()])
            numbers = {k: v.to_torch() for k, v in datum.loss_fn_inputs.items()}
            targets = numbers.pop("target_tokens")
            table = model(input_ids=ids).logits[0].log_softmax(-1)
            logprobs = table.gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(
                output["logprobs"].to_torch(), logprobs.detach(), atol=1e-4, rtol=1e-5
            )
            own = by_hand(loss, logprobs, numbers, config)
            own.backward()
            total += float(own.detach())
        assert sum(half.metrics["loss:sum"] for half in outcome) == pytest.approx(total, rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(trained, 20.0)
        assert result(service, stepped)["metrics"]["grad_norm"] == pytest.approx(
            float(norm), rel=1e-4
        )
        adam.step()
        adam.zero_grad()
    last = result(service, client.save("last"))["path"]
    expected = {
        name.replace(".default", "").removeprefix("base_model.model."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    own = values(service, last)
    moved = max(float((own[k] - v).abs().max()) for k, v in values(service, first).items())
    assert moved > 1e-3
    for name, parameter in expected.items():
        torch.testing.assert_close(
            own[name.removesuffix(".weight")], parameter.detach(), atol=1e-5, rtol=0
        )


def train(client, steps, seed, *, between=lambda: None):
    """Some steps of a run, each of two requests and a loss without a gradient."""
    for step in range(steps):
        data = rows(4, 100 * seed + step)
        client.forward_backward(data[:2])
        between()
        client.forward_backward(data[2:], forward_only=step == 1)
        between()
        client.optim_step(learning_rate=1e-3 / (1 + step))
        between()


def finished(service, client, name="end", since=0):
    """Weights of a run after all that was sent, and what requests have given from one on."""
    path = result(service, client.save(name))["path"]
    given = [service.future(each).result(60).body for each in client.request_ids[1 + since : -1]]
    return values(service, path), given


def assert_same(found, expected):
    assert found[1] == expected[1][len(expected[1]) - len(found[1]) :]
    assert found[0].keys() == expected[0].keys()
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


def outcomes(service, client):
    """Numbers of each request that was sent, by name; the words of one that failed."""
    obtained = []
    for request_id in client.request_ids[1:-1]:
        outcome = result(service, request_id)
        if isinstance(outcome, dict):
            obtained.append(outcome.get("metrics", outcome))
        else:
            outputs = enumerate(outcome.loss_fn_outputs)
            lists = {f"{n} {k}": v.tolist() for n, each in outputs for k, v in each.items()}
            obtained.append(outcome.metrics | lists)
    return obtained


def assert_near(found, expected):
    """As passes of other shapes give; Adam enlarges the roundings of small gradients."""
    for outcome, wanted in zip(found[1], expected[1], strict=True):
        assert outcome.keys() == wanted.keys()
        for name, value in wanted.items():
            near = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-5)
            assert outcome[name] == near
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_runs_that_take_turns_on_a_base_get_what_each_gets_alone(start):
    kinds = [{"rank": 4}, {"rank": 7, "train_mlp": False}, {"rank": 2, "train_unembed": False}]
    alone = []
    for number, kind in enumerate(kinds):
        service = start(f"alone{number}")
        client = Client(service, **kind)
        train(client, 3, number)
        alone.append(finished(service, client))
    together = start("together", max_adapters=2)  # one of the three is on disk
    clients = [Client(together, **kind) for kind in kinds]
    steps = [iter_steps(client, 3, number) for number, client in enumerate(clients)]
    order = random.Random(0)
    while steps:
        chosen = order.choice(steps)
        if next(chosen, None) is None:
            steps.remove(chosen)
        elif order.random() < 0.3:  # else the next request waits behind this one
            together.future(order.choice(clients).request_ids[-1]).result(60)
    for client, expected in zip(clients, alone, strict=True):
        assert_same(finished(together, client), expected)


def test_runs_that_ask_at_once_share_a_pass_and_get_what_each_gets_alone(start):
    kinds = [{"rank": 4}, {"rank": 7, "train_mlp": False}, {"rank": 2, "train_unembed": False}]
    alone, counts = [], (1, 5, 3)

    def ask(client, number):
        """Passes of several requests and two losses, one of them broken, and a step."""
        client.forward_backward(rows(counts[number], number))
        policy = rows(counts[number], 10 + number, "importance_sampling")
        client.forward_backward(policy, "importance_sampling")
        client.forward_backward(rows(2, 20 + number), forward_only=True)
        if number == 1:
            broken = endless(rows(2, 4, "importance_sampling"))
            client.forward_backward(broken, "importance_sampling")
        client.forward_backward(rows(4, 30 + number))
        client.optim_step()
        # Factors B are no longer 0: the gradient of a layer's input is through them too.
        client.forward_backward(rows(4, 40 + number))
        client.optim_step()

    for number, kind in enumerate(kinds):
        service = start(f"alone{number}", tokens_per_device=40)
        client = Client(service, **kind)
        ask(client, number)
        alone.append((finished(service, client)[0], outcomes(service, client)))
        assert service.worker.passes_of_several == 0
    together = start("together", tokens_per_device=40)
    clients = [Client(together, **kind) for kind in kinds]
    for client in clients:
        together.future(client.request_ids[0]).result(60)
    together.close()  # all is accepted before anything is worked off
    together._closed = False
    for number, client in enumerate(clients):
        ask(client, number)
    together.start()
    for client, expected in zip(clients, alone, strict=True):
        assert_near((finished(together, client)[0], outcomes(together, client)), expected)
    assert together.worker.passes_of_several >= 5


def iter_steps(client, steps, seed):
    """As :func:`train`, a request at a time."""
    for step in range(steps):
        data = rows(4, 100 * seed + step)
        yield client.forward_backward(data[:2])
        yield client.forward_backward(data[2:], forward_only=step == 1)
        yield client.optim_step(learning_rate=1e-3 / (1 + step))


@pytest.mark.parametrize("state_every", [1, 3] if ALL else [3])
def test_a_service_that_ends_anywhere_goes_on_there(start, state_every):
    expected_service = start("whole")
    expected_client = Client(expected_service)
    train(expected_client, 4, 9)
    expected = finished(expected_service, expected_client)
    for cut in range(1, 12, 2):
        service = start(f"cut{cut}", state_every=state_every)
        client = Client(service)
        steps = iter_steps(client, 4, 9)
        for _ in range(cut):
            request_id = next(steps)
        service.future(request_id).result(60)
        service.close()
        if cut % 4 == 1:  # one more is accepted, and not begun
            service._closed = False
            next(steps)
        client.service = start(f"cut{cut}", state_every=state_every)
        for _ in steps:
            pass
        assert_same(finished(client.service, client, since=cut), expected)


def test_requests_that_come_twice_or_out_of_order_are_worked_off_once_in_order(start):
    ordered = start("ordered")
    client = Client(ordered)
    train(client, 3, 5)
    expected = finished(ordered, client)
    shuffled = start("shuffled")
    other = Client(shuffled)
    sent = []

    def keep(run, seq, kind, body):
        sent.append((seq, kind, body))
        return f"{run}:{seq}"

    other.service = type("Recorder", (), {"submit": staticmethod(keep)})
    train(other, 3, 5)
    other.service = shuffled
    sent += random.Random(1).sample(sent, 5)
    random.Random(2).shuffle(sent)
    for seq, kind, body in sent:
        shuffled.submit(other.run, seq, kind, body)
    assert_same(finished(shuffled, other), expected)
    before = shuffled.worker.adapters[other.run].steps
    for seq, kind, body in sent:  # and once more when all is over
        shuffled.submit(other.run, seq, kind, body)
    assert shuffled.worker.adapters[other.run].steps == before == 3
    run = shuffled.runs[other.run]
    assert not run.waiting
    assert len((run.store.directory / "metrics.jsonl").read_text().splitlines()) == 3
    Client(shuffled, session=other.session)  # asks for the same model
    assert [*shuffled.runs] == [other.run]


def test_a_gradient_that_is_not_finite_is_dropped_and_told(start, base):
    service = start()
    client, other = Client(service), Client(service, 1)
    client.forward_backward(rows(2, 3))
    broken = endless(rows(2, 4, "importance_sampling"))
    failed = result(service, client.forward_backward(broken, "importance_sampling"))
    assert failed["category"] == "user"
    assert "not finite" in failed["error"]
    lacking = result(service, client.optim_step())
    assert "needs a gradient" in lacking["error"]
    for each in (client, other):  # nothing has changed, and both go on
        each.forward_backward(rows(2, 3))
        each.optim_step()
    first, second = (finished(service, each)[0] for each in (client, other))
    assert all(torch.equal(first[k], second[k]) for k in first)
    ignored = rows(2, 4, "importance_sampling")
    ignored[0].loss_fn_inputs["logprobs"]._numpy[0] = -300.0  # an advantage of 0 has no ratio
    client.forward_backward(ignored, "importance_sampling")
    assert 0 < result(service, client.optim_step())["metrics"]["grad_norm"] < torch.inf


def test_answers_do_not_depend_on_what_is_sampled_beside_them(start):
    service = start()
    client = Client(service)
    train(client, 2, 2)
    name = json.dumps({"path": "now"}).encode()
    path = result(service, client.send("save_weights_for_sampler", name))["path"]
    sampler = service.registry.create_sampler(client.session, 0, base=None, path=path)
    other = service.registry.create_sampler(client.session, 1, base="short", path=None)
    assert service.registry.samplers[other]["base_model"] == NAME

    def ask(seq, prompt, **params):
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 12, "seed": 6, **params},
            "prompt_logprobs": True,
        }
        return service.sample(body)[0]

    def answered(request_id):
        return deserialize_sample_response(service.future(request_id).result(60).body)

    prompts = [[5, 6, 7, 8], [9, 10, 11], [40, 41, 42, 43, 44]]
    assert ask(0, prompts[0]) == ask(0, prompts[0])
    alone = [answered(ask(n, prompt)) for n, prompt in enumerate(prompts)]
    together = [ask(10 + n, prompt) for n, prompt in enumerate(prompts)]
    for one, request_id in zip(alone, together, strict=True):
        other = answered(request_id)
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert one.prompt_logprobs[1:] == pytest.approx(other.prompt_logprobs[1:], abs=1e-5)
    assert alone[0].sequences[0].tokens != alone[0].sequences[1].tokens
    # The log-probabilities are those that training finds of the same tokens.
    for sequence in alone[0].sequences:
        whole = [*prompts[0], *sequence.tokens]
        datum = types.Datum(types.ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})
        outcome = result(service, client.forward_backward([datum], forward_only=True))
        trained = outcome.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert trained[3:].tolist() == pytest.approx(sequence.logprobs, abs=1e-4)
        assert trained[:3].tolist() == pytest.approx(alone[0].prompt_logprobs[1:], abs=1e-4)


def test_too_many_requests_and_unknown_names_are_refused(start):
    service = start(max_queue=2)
    client = Client(service)
    service.future(client.request_ids[0]).result(60)
    run = client.run
    service.submit(run, 5, "optim_step", b"{}")
    service.submit(run, 6, "optim_step", b"{}")
    with pytest.raises(BusyError, match="2 requests wait"):
        service.submit(run, 7, "optim_step", b"{}")
    service.submit(run, 6, "optim_step", b"{}")  # this one waits already
    with pytest.raises(NotFoundError, match="no model"):
        service.submit("nobody:train:0", 1, "optim_step", b"{}")
    with pytest.raises(NotFoundError, match="nothing is known"):
        service.future(f"{run}:99")
