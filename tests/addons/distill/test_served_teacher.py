"""A teacher behind a server: what it is asked, what it says, and what is refused."""

import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import dschat_lora as dl
from api.programs import ROWS
from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.distill.served_teacher import (
    TeacherError,
    open_teacher,
    read_prompt_logprobs,
)
from dschat_lora.addons.distill.stage import DistillConfig
from dschat_lora.addons.engines import completion_pool
from dschat_lora.addons.engines.completions import ServerError
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.config.options import parse_config
from dschat_lora.generation import slots
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.response.response import Response
from helpers.served import send, served, write_run
from helpers.spread import ALL

SHORT = {
    "distill_loss": "sampled_reverse_kl",
    "max_steps": 3,
    "per_device_generation_batch_size": 4,
    "per_device_training_batch_size": 4,
    "max_prompt_seq_len": 24,
    "max_answer_seq_len": 6,
    "eval_prompts": 2,
    "lora_dim": 4,
    "lora_learning_rate": 3e-3,
    "quiet": True,
}
NAMES = ("loss", "kl", "reward", "grad_norm")


@contextmanager
def scoring(logprobs_of, limit=200):
    """Within, a server that says of the tokens of a prompt what ``logprobs_of`` does."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, content):
            text = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.reply({"data": [{"id": "big", "max_model_len": limit}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["prompt"]
            ids = tokenizer()(prompt).input_ids if isinstance(prompt, str) else prompt
            self.reply({"choices": [{"prompt_logprobs": logprobs_of(ids, prompt)}]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def halves(ids, prompt):
    return [None, *({str(token): {"logprob": -token / 2}} for token in ids[1:])]


def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def opened(address, model="", own=None, most=100, said=()):
    return open_teacher(
        address,
        model,
        own or tokenizer(),
        max_seq_len=most,
        timeout=5.0,
        in_flight=2,
        say=list(said).append,
    )


def stock_logprobs(run, ids):
    """What transformers and PEFT say of tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    if run is not None:
        model = PeftModel.from_pretrained(model, run / "adapter")
    with torch.no_grad():
        table = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("size", [7, *[512] * ALL])
def test_serve_gives_log_probabilities_of_prompts(tmp_path, monkeypatch, size):
    monkeypatch.setattr(slots, "SCORED_TOKENS", size)
    run = write_run(tmp_path / "run", seed=3)
    prompts = [tokenizer()(text).input_ids for text in ("What is the opposite of hot?", "Hi")]
    prompts += [prompts[0] * 3]
    with served("base", run) as address:
        for model, own in (("base", None), ("run", run)):
            body = {"model": model, "prompt": prompts, "max_tokens": 3, "prompt_logprobs": 0}
            status, reply = send(address, "POST", "/v1/completions", body)
            assert status == 200, reply
            plain = send(address, "POST", "/v1/completions", {**body, "prompt_logprobs": None})[1]
            for ids, choice, other in zip(prompts, reply["choices"], plain["choices"], strict=True):
                first, *entries = choice["prompt_logprobs"]
                assert first is None
                assert [int(token) for entry in entries for token in entry] == ids[1:]
                said = torch.tensor([each["logprob"] for e in entries for each in e.values()])
                torch.testing.assert_close(said, stock_logprobs(own, ids), atol=1e-4, rtol=1e-4)
                assert "prompt_logprobs" not in other
        for changes, words in (
            ({"stream": True}, "prompt_logprobs is for stream: false"),
            ({"prompt_logprobs": 2}, "prompt_logprobs must be"),
        ):
            status, reply = send(address, "POST", "/v1/completions", {**body, **changes})
            assert status == 400
            assert words in reply["error"]["message"]


def test_log_probabilities_are_those_of_the_response_after_what_the_teacher_reads():
    answered = [
        Response((3, 4), (5, 6), True, 0),
        Response((3, 4), (), True, 0),
        Response((8,), (9,), True, 1, reference_prompt=(1, 2, 8)),
    ]
    asked = []

    def noted(ids, prompt):
        asked.append(prompt)
        return halves(ids, prompt)

    with scoring(noted) as address:
        teacher = opened(address)
        assert (teacher.model, teacher.limit) == ("big", 200)
        assert teacher.begin(answered)() == [[-2.5, -3.0], [], [-4.5]]
    assert sorted(asked[1:]) == [[1, 2, 8, 9], [3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "no choices with prompt_logprobs"),
        ([None, {"5": {"logprob": -1.0}}], "scored 1 tokens other than those sent to it"),
        ([None, {"4": {"logprob": -1.0}}, {"6": {"logprob": -1.0}}], "other than those sent"),
        ([None, {"4": {"logprob": -1.0}}, {"5": {"logprob": float("nan")}}], "not log-probabilit"),
        ([None, {"4": {"logprob": -1.0}}, {"5": {"logprob": 0.5}}], "not log-probabilities"),
        ([None, {}, {}], "no choices with prompt_logprobs"),
    ],
)
def test_a_teacher_that_says_nonsense_ends_the_run_in_a_line(monkeypatch, found, words):
    monkeypatch.setattr(completion_pool, "PATIENCE", 0.0)

    def nonsense(ids, prompt):
        return halves(ids, prompt) if isinstance(prompt, str) else found

    with scoring(nonsense) as address:
        wait = opened(address).begin([Response((3, 4), (5,), True, 0)])
        with pytest.raises(TeacherError) as caught:
            wait()
    line = str(caught.value.__cause__)
    assert line.startswith(f"--teacher_model_name_or_path {address}: ")
    assert words in line
    assert "\n" not in line


def test_a_teacher_that_does_not_fit_is_refused_in_a_line():
    def refused(words, address, **options):
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            opened(address, **options)
        assert "\n" not in str(caught.value)

    with scoring(halves) as address:
        refused("it has a different tokenizer", address, own=build_byte_tokenizer())
        refused("its context is 200 tokens, but --max_prompt", address, most=200)
        refused(f"it serves the models big: name one, as in {address}/v1#NAME", address, model="no")
    refused(f"--teacher_model_name_or_path {address} cannot be used: ", address)
    with pytest.raises(ServerError, match="no choices with prompt_logprobs"):
        read_prompt_logprobs({"choices": [{"text": "x"}]})


def test_a_served_teacher_is_refused_without_the_add_on_that_asks_servers(monkeypatch):
    monkeypatch.setattr("dschat_lora.addons.distill.options.installed", dict)
    argv = f"--teacher_model_name_or_path http://a:1 --distill_loss {SHORT['distill_loss']}"
    with pytest.raises(ValueError, match="of a server needs the add-on engines, which is not in"):
        check_rlhf(parse_config(DistillConfig, argv.split()))


@pytest.mark.stage
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.thorough), {"teacher_system_prompt": "Be kind."}],
    ids=["the student's prompts", "prompts of its own"],
)
def test_a_run_with_a_served_teacher_is_that_with_it_in_memory(tmp_path, built, more):
    teacher = write_run(tmp_path / "teacher", seed=3)
    own = dl.distill(data=ROWS, teacher=str(teacher), **more, **SHORT)
    built.clear()
    with served("base", teacher) as address:
        run = dl.distill(
            data=ROWS, teacher=f"{address}/v1#teacher", output_dir=tmp_path / "run", **more, **SHORT
        )
    assert sorted(built[0].models.roles.models) == ["actor"]
    assert [line["kind"] for line in run.metrics] == [line["kind"] for line in own.metrics]
    for line, expected in zip(run.metrics, own.metrics, strict=True):
        for name in set(NAMES) & set(expected):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4)


@pytest.mark.stage
def test_a_run_goes_on_with_the_teacher_at_another_address_after_its_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(completion_pool, "PATIENCE", 0.0)
    teacher, common = write_run(tmp_path / "teacher", seed=3), {"data": ROWS, **SHORT}
    home = tmp_path / "run"
    service = served(teacher)
    address = service.__enter__()

    def stop_server(event, step, metrics):
        if step == 1:
            service.__exit__(None, None, None)

    with pytest.raises(OSError, match=f"^--teacher_model_name_or_path {address}: "):
        dl.distill(
            teacher=f"{address}/v1#teacher", output_dir=home, callbacks=[stop_server], **common
        )
    assert len(checkpoints_of(home)) == 1
    with served(teacher) as other:
        rest = dl.distill(teacher=f"{other}#teacher", output_dir=home, resume="latest", **common)
    assert rest.status == "finished"
    steps = [line["step"] for line in rest.metrics if line["kind"] == "train"]
    assert steps == [1, 2, 3]
