"""A user's rollout engine: what it has to have, what is checked, and how a run learns from it."""

import json
import math
from contextlib import ExitStack
from types import SimpleNamespace as Has

import pytest

import dschat_lora as dl
from dschat_lora.config.options import parse_config
from dschat_lora.config.when import without_effect
from dschat_lora.generation.sampling import Sampling
from dschat_lora.rl.draw.engine import Asked, Drawn, EngineDecoder, RolloutError
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.engines import EngineFacts, engine_facts
from helpers.random_engine import Engine, Known
from helpers.rlhf_course import save_family, write_prompts

COMMON = """
    --algorithm grpo --num_generations 4 --reward_function helpers.rlhf_course:vowels
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --max_steps 4 --eval_prompts 2 --eval_ratio 0.2
    --actor_lora_dim 4 --actor_lora_learning_rate 5e-3 --num_train_epochs 9 --save_minutes 0
""".split()
CHECKED = ["--algorithm", "grpo", "--reward_function", "helpers.rlhf_course:vowels"]
PLAIN = Sampling(4)
RANDOM = "helpers.random_engine:Engine"


class Site:
    """Of an actor of 50 tokens, of which 2 ends a response."""

    def __init__(self, name, at_a_time=0):
        facts = EngineFacts(batches_itself=not at_a_time)
        batch = Has(rollout_engine=name, engine=facts, rows_decoded=at_a_time)
        self.config = Has(batch=batch, ppo=Has(use_rollout_logprobs=False))
        self.actor = Has(model=Has(config=Has(vocab_size=50)))
        self.ends, self.run, self.version = frozenset([2]), Has(closing=ExitStack()), lambda: 7


def drawn(*responses, limits=None, sampling=PLAIN, **methods):
    """What is read of responses that an engine ``my:Engine`` gives to prompts of one token."""
    own = type("Engine", (), {"draw": lambda *_: lambda: responses, **methods})()
    with EngineDecoder(own, Site("my:Engine")).decoding() as (begin, at_a_time):
        assert at_a_time is None
        prompts = [[5]] * (len(responses) or 1)
        options = {"seeds": [[n] for n in range(len(prompts))], "keep_logprobs": True}
        return begin(prompts, sampling, limits=limits, **options)()


@pytest.mark.usefixtures("one_rank")
def test_what_is_drawn_after_an_end_is_left_out_with_its_log_probabilities():
    cut, whole = drawn(Drawn([3, 2, 9], [-1.0, -2.0, -3.0]), Drawn([3, 4, 9]))
    assert (cut.tokens, whole.tokens) == ([3, 2], [3, 4, 9])
    assert cut.sampler_logprobs == cut.logprobs == [-1.0, -2.0]
    assert all(map(math.isnan, whole.logprobs))
    # Of another distribution than the policy's, the policy's are not known.
    (turn,) = drawn(Drawn([3], [-1.0]), sampling=Sampling(4, top_p=0.5))
    assert (turn.sampler_logprobs, math.isnan(turn.logprobs[0])) == ([-1.0], True)


NOT_EACH = "gave log-probabilities that are not one in nats for each token"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("given", "limit", "words"),
    [
        ([Drawn([3, 50])], 9, "returned the token 50, but the actor's vocabulary has 50"),
        ([Drawn([-1])], 9, "returned the token -1"),
        ([Drawn([3] * 5)], 9, "returned more tokens (5) than the limit of 4"),
        ([Drawn([3, 4, 5])], 2, "returned more tokens (3) than the limit of 2"),  # of a turn
        ([Drawn([])], 9, "returned a response without tokens"),
        ([Drawn([3, 4], [-1.0])], 9, f"{NOT_EACH} (1 for 2)"),
        ([Drawn([3], [0.7])], 9, f"{NOT_EACH} (1 for 1)"),
        ([], 9, "returned a wrong number of responses: 0 instead of 1"),
    ],
)
def test_what_is_no_response_is_told_in_one_line_that_names_the_engine(given, limit, words):
    with pytest.raises(RolloutError) as error:
        drawn(*given, limits=[limit])
    cause = error.value.__cause__
    assert str(cause).startswith(f"--rollout_engine my:Engine {words}")
    assert isinstance(cause, OSError)  # which is shown without its place


@pytest.mark.usefixtures("one_rank")
def test_an_error_of_the_engine_is_shown_with_its_place():
    def fail(*_):
        raise KeyError("weights")

    for method in ("draw", "publish", "pause"):
        with pytest.raises(RolloutError) as error:
            drawn(Drawn([3]), **{method: fail})
        cause = error.value.__cause__
        assert str(cause) == "--rollout_engine my:Engine failed: KeyError('weights')"
        assert isinstance(cause, RuntimeError)
        assert isinstance(cause.__cause__, KeyError)


@pytest.mark.usefixtures("one_rank")
def test_an_engine_gets_the_weights_once_a_rollout_and_is_closed_with_the_run():
    told, site = [], Site("my:Engine")

    class Told:
        def publish(self, actor, version):
            told.append((actor is site.actor, version))

        def draw(self, asked, sampling):
            told.append(asked)
            return [Drawn([3])] * len(asked)  # a list is as good as what waits for one

        def close(self):
            told.append("closed")

    with EngineDecoder(Told(), Site("my:Engine", at_a_time=6)).decoding() as (_, at_a_time):
        assert at_a_time == 6
    told.clear()
    with EngineDecoder(Told(), site).decoding() as (begin, _):
        for limits in (None, [1, 9]):
            begin([[5, 6], [7]], Sampling(4), seeds=[[1, 2], [3, 4]], limits=limits)()
    site.run.closing.close()
    weights, first, second, closed = told
    assert (weights, closed) == ((True, 7), "closed")
    assert first[1] == Asked([5, 6], 2, 4, frozenset([2]), 0, keeps_logprobs=False)
    assert [(row.prompt, row.seed, row.limit, row.group) for row in second] == [
        ([5, 6], 1, 1, 0),
        ([5, 6], 2, 1, 0),
        ([7], 3, 4, 1),
        ([7], 4, 4, 1),
    ]


def test_facts_have_defaults_and_are_those_that_a_class_or_object_says():
    facts = engine_facts(RANDOM)
    assert facts.in_process
    assert facts.batches_itself
    others = "exact needs_whole_weights takes_adapter same_model can_run_ahead".split()
    assert not any(getattr(facts, name) for name in others)
    Known.needs_whole_weights, Known.bytes_beside_training = True, lambda self, config: 12
    try:
        known = engine_facts("helpers.random_engine:Known")
        assert known.needs_whole_weights
        assert known.bytes_beside_training(None) == 12
    finally:
        del Known.needs_whole_weights, Known.bytes_beside_training


def test_options_are_those_that_the_engine_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(*more):
        argv = [*CHECKED, "--rollout_engine", RANDOM, *more]
        return check_rlhf(parse_config(RlhfConfig, argv))

    assert check().ppo.rollout_correction == "tis"

    def refuse(self, config):
        raise ValueError("--top_p is nothing for dice")

    monkeypatch.setattr(Engine, "check", refuse, raising=False)
    with pytest.raises(ValueError, match="^--top_p is nothing for dice$"):
        check()
    monkeypatch.setattr(Engine, "needs_whole_weights", True, raising=False)
    with pytest.raises(ValueError, match=f"{RANDOM} needs whole weights, which ZeRO 3 shards"):
        check("--zero_stage", "3", "--actor_lora_dim", "4")
    given = ["--rollout_engine", RANDOM, "--merge_for_rollouts"]
    assert len(without_effect(parse_config(RlhfConfig, given))) == 1


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("random")
    models = save_family("opt", home / "opt", layers=1)
    write_prompts(home / "prompts.jsonl", 12)
    return home, models["actor"]


@pytest.fixture(scope="module")
def report(home, ranks):
    """``report(processes, *options)`` of a run by the command line."""
    where, actor = home

    def call(size, *options, engine=RANDOM):
        out = where / str(len(list(where.iterdir())))
        argv = [*COMMON, "--actor_model_name_or_path", actor, "--rollout_engine", engine]
        argv += ["--data_path", where / "prompts.jsonl", "--output_dir", out]
        for option, count in (("generation", 8), ("training", 4)):
            argv += [f"--per_device_{option}_batch_size", count // size]
        by = "helpers.rlhf_course:train_rlhf"
        return ranks(size).run(by, argv=list(map(str, [*argv, *options])))[0]

    return call


@pytest.mark.stage
def test_random_responses_are_learnt_from_and_the_same_for_any_processes(report):
    one, two = report(1), report(2)
    assert one["texts"] == two["texts"]
    texts = [tokens for rollout in one["texts"] for tokens in rollout]
    assert len({*map(tuple, texts)}) > len(texts) / 2
    assert max(map(len, texts)) <= 8
    lines = [line for line in json.loads(one["lines"]) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [2, 4]
    # Without log-probabilities nothing is weighed: the old ones are the policy's own.
    assert all(line["importance_weight"] == 1 for line in lines)
    assert not any("sampler_error" in line for line in lines)
    assert lines[0]["grad_norm"] > 0


@pytest.mark.stage
def test_given_log_probabilities_are_corrected_for(report):
    known = report(1, engine="helpers.random_engine:Known")
    lines = [line for line in json.loads(known["lines"]) if line["kind"] == "train"]
    # exp(log-probability of the policy + 4), and no run ends for how far they are apart.
    assert all(line["importance_weight"] != 1 for line in lines)
    assert all(line["rollout_kl"] > 0 for line in lines)


@pytest.mark.stage
def test_an_object_in_python_draws_as_the_class_on_the_command_line_and_a_run_resumes(
    home, report, tmp_path
):
    where, actor = home
    rows = [json.loads(line) for line in (where / "prompts.jsonl").read_text().splitlines()]
    more = {"rewards": "helpers.rlhf_course:vowels", "data": rows, "quiet": True}
    options = {
        **more,
        **{"actor_model_name_or_path": actor, "actor_lora_dim": 4, "algorithm": "grpo"},
        **{"num_generations": 4, "max_prompt_seq_len": 14, "max_answer_seq_len": 8},
        **{"per_device_generation_batch_size": 8, "per_device_training_batch_size": 4},
        **{"eval_prompts": 0, "eval_ratio": 0.0, "num_train_epochs": 9, "save_interval": 2},
    }
    whole = dl.rlhf(rollout_engine=Engine(), max_steps=6, output_dir=tmp_path / "whole", **options)

    def stop(event, step, metrics):
        if (event, step) == ("train", 4):
            raise KeyboardInterrupt

    home = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        dl.rlhf(rollout_engine=Engine, max_steps=6, output_dir=home, callbacks=[stop], **options)
    with pytest.raises(ValueError, match="rollout_engine.*, which runs code"):
        dl.rlhf(output_dir=home, resume="latest", **more)
    again = dl.rlhf(rollout_engine=Engine, output_dir=home, resume="latest", **more)
    shown = ("step", "loss", "reward", "response_length", "grad_norm", "kl")

    def lines(run):
        return [[line.get(n) for n in shown] for line in run.metrics if line["kind"] == "train"]

    assert len(lines(whole)) == 3
    assert lines(again) == lines(whole)
