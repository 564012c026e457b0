"""Engines that draw responses: what each of them promises, shown of all of them alike."""

import math
import shlex
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from dschat_lora.rl.draw.server_engine import server_engine
from dschat_lora.rl.draw.vllm_server import ServerProcess, serve_environment

from addons.engines.fake_vllm import command_of
from dschat_lora.addons.engines.completion_pool import CompletionPool
from dschat_lora.addons.engines.completions import CompletionServer
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.engine.rendezvous import usable_port
from dschat_lora.generation.sampling import Sampling, keep_top
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import end_ids, load_tokenizer, share_parameters
from dschat_lora.models.source import find_model
from dschat_lora.rl.draw.engine import EngineDecoder, EngineSite, RolloutError
from dschat_lora.rl.draw.own_engine import OwnEngine
from dschat_lora.rl.options.config import RlhfConfig
from helpers.served import QUESTIONS, served
from helpers.spread import ALL

pytestmark = pytest.mark.usefixtures("one_rank")

ENGINES = ("own", "servers", *["vllm"] * ALL)
SAMPLING = Sampling(12)


def changed(model, seed):
    """Put random values into the second factors of adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.02, generator=generator)


@pytest.fixture(scope="module")
def actor():
    source, options = find_model(None), ModelConfig()
    tokenizer = load_tokenizer(source.tokenizer, options)
    adapted = build_causal_lm(
        source, tokenizer, options, LoraConfig(lora_dim=4), dtype=torch.float32, seed=0, meta=False
    )
    changed(adapted.model.eval(), 1)
    ends = [*end_ids(tokenizer), tokenizer.encode(".", add_special_tokens=False)[0]]
    prompts = [tokenizer(f"\n\nHuman: {text}\n\nAssistant:")["input_ids"] for text in QUESTIONS]
    return SimpleNamespace(
        adapted=adapted, model=adapted.model, tokenizer=tokenizer, ends=ends, prompts=prompts
    )


def server(mode="processed_logprobs"):
    return served("base", allow_runtime_lora_updating=True, logprobs_mode=mode)


@pytest.fixture(scope="module")
def addresses():
    with server() as first, server() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def vllm(addresses, tmp_path_factory):
    """The address of a child process that one of the servers stands behind."""
    address = f"http://127.0.0.1:{(port := usable_port(None))}"
    log = tmp_path_factory.mktemp("run") / "vllm" / "0.log"
    child = CompletionServer(address, 60.0, log=log)
    command = [*shlex.split(command_of(addresses[0])), "--port", str(port)]
    process = ServerProcess(child, command, serve_environment(None, sleeps=False))
    process.wait(20.0)
    yield address
    process.close()


def site_of(actor):
    """What engines are made of."""
    model = share_parameters(actor.model).eval()
    return EngineSite(
        config=parse_config(RlhfConfig, ["--per_device_generation_batch_size", "8"]),
        run=SimpleNamespace(closing=ExitStack(), log=SimpleNamespace(say=lambda words: None)),
        base=find_model(None).base,
        actor=actor.adapted,
        trained=SimpleNamespace(device=torch.device("cpu"), zero_stage=0),
        rollout=model,
        sharded=model,
        ends=frozenset(actor.ends),
        pad_id=int(actor.tokenizer.pad_token_id),
        plan=None,
        unpacked=None,
    )


def engine_of(addresses, actor, **options):
    return server_engine(site_of(actor), [CompletionServer(a, 60.0) for a in addresses], **options)


@pytest.fixture(params=ENGINES)
def decoding(request, actor):
    """A function that gives a context with the engine's decoder."""
    if request.param == "own":
        engine = OwnEngine(site_of(actor))
    elif request.param == "servers":
        engine = engine_of(request.getfixturevalue("addresses"), actor)
    else:
        engine = engine_of([request.getfixturevalue("vllm")], actor)
    yield lambda: decoder_of(engine)
    closed(engine)


def tokens_of(turns):
    return [each.tokens for each in turns]


@contextmanager
def decoder_of(engine):
    with engine.decoding() as (begin, _):
        yield lambda *args, **options: begin(*args, **options)()


def closed(engine):
    if isinstance(engine, EngineDecoder) and hasattr(engine.engine, "close"):
        engine.engine.close()


def expected_logprobs(actor, prompt, tokens, sampling):
    """Log-probabilities of a response by a pass of the plain model over all of it."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = actor.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    table = keep_top(logits / sampling.temperature, sampling).log_softmax(-1)
    return table.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("cut", [{"temperature": 1.5, "top_p": 0.8, "top_k": 20}, *[{}] * ALL])
def test_tokens_come_with_the_log_probabilities_that_they_were_drawn_with(decoding, actor, cut):
    sampling = Sampling(12, **cut, policy_temperature=1.0)
    for seed in (1, 2):  # of an adapter that changes
        changed(actor.model, seed)
        with decoding() as decode:
            seeds = [[10 * n + k for k in range(4)] for n in range(len(actor.prompts))]
            responses = decode(actor.prompts, sampling, seeds=seeds, keep_logprobs=True)
            tokens, own = tokens_of(responses), [each.logprobs for each in responses]
            drawn = [each.sampler_logprobs for each in responses]
        assert not any(each.undrawn for each in responses)
        assert len(tokens) == 12
        for row, response in enumerate(tokens):
            prompt = actor.prompts[row // 4]
            expected = expected_logprobs(actor, prompt, response, sampling)
            assert drawn[row] == pytest.approx(expected, abs=1e-4)
            whole = expected_logprobs(actor, prompt, response, SAMPLING)
            known = not any(map(math.isnan, own[row]))
            assert known or cut  # other engines know those of the policy where it is drawn from
            assert len(own[row]) == len(response)
            assert own[row] == pytest.approx(whole, abs=1e-4) or not known
        # Up to and including the first end, or the limit.
        ends = [[token in actor.ends for token in response] for response in tokens]
        assert not any(any(each[:-1]) for each in ends)
        assert all(each[-1] or len(each) == 12 for each in ends)
        assert any(each[-1] for each in ends)
    changed(actor.model, 1)


def test_seeds_repeat_responses_and_limits_cut_them(decoding, actor):
    seeds = [[1, 2], [3, 4], [5, 6]]
    with decoding() as decode:
        first = tokens_of(decode(actor.prompts, SAMPLING, seeds=seeds))
        again = tokens_of(decode(actor.prompts, SAMPLING, seeds=seeds))
        other = tokens_of(decode(actor.prompts, SAMPLING, seeds=[[7, 8], [9, 10], [11, 12]]))
        cut = tokens_of(decode(actor.prompts, SAMPLING, seeds=seeds, limits=[2, 5, 99]))
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert [max(map(len, cut[n : n + 2])) for n in (0, 2)] == [2, 5]
    assert max(map(len, cut[4:])) <= 12


def test_greedy_responses_are_those_of_the_plain_model(decoding, actor):
    with decoding() as decode:
        texts = tokens_of(
            decode(actor.prompts, Sampling(9, do_sample=False), seeds=[[0], [0], [0]])
        )
    for prompt, response in zip(actor.prompts, texts, strict=True):
        expected = []
        while not expected or (len(expected) < 9 and expected[-1] not in actor.ends):
            with torch.no_grad():
                logits = actor.model(torch.tensor([[*prompt, *expected]])).logits
            expected.append(int(logits[0, -1].argmax()))
        assert response == expected


def test_tokens_are_drawn_from_the_models_distribution(decoding, actor):
    prompt, count = actor.prompts[2], 300
    with decoding() as decode:
        texts = tokens_of(decode([prompt], Sampling(1), seeds=[list(range(count))]))
    with torch.no_grad():
        chances = actor.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    drawn = torch.bincount(torch.tensor(texts)[:, 0], minlength=len(chances)) / count
    errors = (chances * (1 - chances) / count).sqrt() + 1e-3
    assert chances.max() < 0.95
    assert ((drawn - chances).abs() / errors).max() < 4


def test_servers_that_give_raw_log_probabilities_are_refused_where_those_are_others(actor):
    with server("raw_logprobs") as address:
        engine = engine_of([address], actor)
        with decoder_of(engine) as decode:
            call = {"seeds": [[1]], "keep_logprobs": True}
            (plain,) = decode(actor.prompts[:1], SAMPLING, **call)
            expected = expected_logprobs(actor, actor.prompts[0], plain.tokens, SAMPLING)
            assert plain.logprobs == pytest.approx(expected, abs=1e-4)
            with pytest.raises(RolloutError) as error:
                decode(actor.prompts[:1], Sampling(4, top_p=0.9), **call)
            assert "--logprobs_mode processed_logprobs" in str(error.value.__cause__)
        closed(engine)


def test_servers_that_sleep_are_awake_for_an_adapter_and_what_it_draws(
    actor, addresses, monkeypatch
):
    calls, load, begin = [], CompletionPool.load, CompletionPool.begin
    monkeypatch.setattr(CompletionPool, "set_awake", lambda self, awake: calls.append(awake))

    def loading(self, adapters):
        calls.append("load")
        load(self, adapters)

    def beginning(self, *args, **options):
        calls.append("begin")
        return begin(self, *args, **options)

    monkeypatch.setattr(CompletionPool, "load", loading)
    monkeypatch.setattr(CompletionPool, "begin", beginning)
    for sleeps, expected in ((True, [True, "load", "begin", False]), (False, ["load", "begin"])):
        engine = engine_of(addresses, actor, sleeps=sleeps)
        calls.clear()
        with decoder_of(engine) as decode:
            decode(actor.prompts[:1], Sampling(1), seeds=[[1]])
        assert calls == expected
        closed(engine)


def test_responses_are_the_same_when_a_server_is_gone(actor, addresses):
    call = {"seeds": [[1], [2], [3]]}
    with server() as lost:
        engine = engine_of([addresses[0], lost], actor)
        with decoder_of(engine) as decode:
            first = tokens_of(decode(actor.prompts, SAMPLING, **call))
    with decoder_of(engine) as decode:
        assert tokens_of(decode(actor.prompts, SAMPLING, **call)) == first
    closed(engine)
