"""Verbs and servers of models that see: greedy answers are those of stock transformers and PEFT."""

import base64
import gc
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import PeftModel
from PIL import Image
from seeing import Stock, as_sent, asked, data_uri, write_adapter
from transformers import AutoModelForSequenceClassification

import dschat_lora as dl
from addons.images.vlms import drawn, spread, tiny_vlm
from dschat_lora.addons.images import entries
from dschat_lora.commands import verbs
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.values import ALL_BESIDE
from dschat_lora.data.media import FIRST_ID, media_reader
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.supervised.inference import load_policy
from helpers.served import send, served
from helpers.step1 import write_jsonl

A, B = drawn(40, 24, seed=1), drawn(20, 50, seed=2)
QUESTIONS = (
    asked(A, "What is it?"),
    asked(B, "What is it?"),
    asked("one ", B, " two ", A, " three"),
    [{"role": "user", "content": "Hello?"}],
    [*asked(B, "What?"), {"role": "assistant", "content": "A cat."}, *asked(A, "And this?")],
)
COUNT = 6  # tokens of an answer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_vlm("gemma3", tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def runs(base):
    return [write_adapter(base, base.parent / name, seed=seed) for seed, name in enumerate("ab")]


@pytest.fixture(scope="module")
def stock(base, runs):
    return Stock(base, *runs)


@pytest.fixture(scope="module")
def address(base, runs):
    with served(*runs, max_new_tokens=COUNT, temperature=0.0, max_seq_len=200) as server:
        yield server


@pytest.fixture
def rows(tmp_path):
    """``rows(*rows)``: a file of them beside the picture ``a.png``; its path."""
    A.save(tmp_path / "a.png")
    return lambda *rows: str(write_jsonl(tmp_path / "rows.jsonl", rows))


def chat(address, messages, model="base", **fields):
    body = {"model": model, "messages": messages, **fields}
    return send(address, "POST", "/v1/chat/completions", body)


# Verbs


@pytest.mark.parametrize(
    "kind", spread("llava_next", smoke=("qwen3_vl",), of=("llava_next", "qwen3_vl"))
)
def test_generate_answers_rows_with_one_several_and_no_pictures_as_stock(kind, tmp_path):
    model = tiny_vlm(kind, tmp_path / "model")
    stock = Stock(model)
    given = [stock.text(stock.answer(each, COUNT)[0]) for each in QUESTIONS]
    assert len(set(given)) == len(given)  # what is seen matters
    texts = dl.generate(str(model), QUESTIONS, max_new_tokens=COUNT, dtype="fp32")
    assert texts == given


def test_generate_of_an_adapter_takes_files_beside_the_data_and_on_the_line(
    runs, stock, rows, tmp_path, capsys
):
    row = {"prompt": [{"role": "user", "content": "What is it?"}], "image": "a.png"}
    options = ["--max_new_tokens", str(COUNT), "--dtype", "fp32", "--json"]
    expected, _ = stock.answer(QUESTIONS[0], COUNT, run=runs[0])
    for given in (
        ["--data_path", rows(row)],
        ["What is it?", "--chat", "--image", str(tmp_path / "a.png")],
    ):
        verbs.generate([str(runs[0]), *given, *options])
        line = json.loads(capsys.readouterr().out)
        assert line["tokens"][: len(expected)] == expected
        assert "[picture a.png]" in line["prompt"]
        assert "soft_token" not in line["prompt"]


def test_a_prompt_as_text_has_its_picture_in_front_or_at_its_sign(base, stock, rows, tmp_path):
    options = {"image": str(tmp_path / "a.png"), "max_new_tokens": COUNT, "dtype": "fp32"}
    processor = stock.processor._processor
    for prompt in ("What?", "See <image> what?"):
        text = prompt if "<image>" in prompt else "<image>" + prompt
        text = text.replace("<image>", "<start_of_image>")
        inputs = processor(text=[text], images=[[A]], return_tensors="pt")
        with stock.model.disable_adapter():
            ids = stock.model.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
        expected = stock.text(ids[0, inputs["input_ids"].shape[1] :])
        assert dl.generate(str(base), prompt, **options) == [expected]


def test_pictures_for_a_model_of_text_alone_are_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="text only"):
        dl.generate(None, "What?", image=str(tmp_path / "a.png"))


def test_eval_measures_answers_to_pictures_as_stock_does(runs, stock, rows):
    answer = "A cat with a hat"
    row = {
        "prompt": [{"role": "user", "content": "What is it?"}],
        "completion": [{"role": "assistant", "content": answer}],
        "images": ["a.png"],
    }
    metrics = dl.evaluate(str(runs[1]), rows(row), dtype="fp32")
    inputs = stock.inputs(QUESTIONS[0])
    size = inputs["input_ids"].shape[1]
    end = stock.tokenizer(answer + stock.tokenizer.eos_token, add_special_tokens=False)
    ids = torch.cat([inputs["input_ids"], torch.tensor([end["input_ids"]])], dim=1)
    types = torch.nn.functional.pad(inputs["token_type_ids"], (0, ids.shape[1] - size))
    stock.model.set_adapter(runs[1].name)
    with torch.no_grad():
        logits = stock.model(
            input_ids=ids, pixel_values=inputs["pixel_values"], token_type_ids=types
        ).logits
    loss = torch.nn.functional.cross_entropy(logits[0, size - 1 : -1], ids[0, size:])
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_scores_of_answers_to_pictures_are_those_of_stock(base, stock, rows, tmp_path, capsys):
    from dschat_lora.addons.evaluation.verbs import score

    reward = write_adapter(base, tmp_path / "reward", seed=4, reward=True)
    questions = [{"role": "user", "content": [{"type": "image"}, *QUESTIONS[0][0]["content"][1:]]}]
    answers = [[{"role": "assistant", "content": text}] for text in ("A cat", "Two dogs here")]
    row = {"prompt": questions, "chosen": answers[0], "rejected": answers[1], "images": ["a.png"]}
    score([str(reward), rows(row), "--dtype", "fp32"])
    scores = json.loads(capsys.readouterr().out)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(model, reward / "adapter").eval()
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        text = stock.tokenizer.apply_chat_template(QUESTIONS[0] + answer, tokenize=False)
        inputs = stock.processor._processor(text=[text], images=[[A]], return_tensors="pt")
        with torch.no_grad():
            expected = float(model(**inputs).logits[0, 0])
        assert scores[f"{name}_score"] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_text_is_answered_without_files_of_a_processor_and_pictures_say_what_lacks(tmp_path):
    model = tiny_vlm("llava_next", tmp_path / "model")
    given = dl.generate(str(model), [QUESTIONS[3]], max_new_tokens=COUNT, dtype="fp32")
    (model / "preprocessor_config.json").unlink()
    (model / "processor_config.json").unlink()
    texts = dl.generate(str(model), [QUESTIONS[3]], max_new_tokens=COUNT, dtype="fp32")
    assert texts == given
    with pytest.raises(ValueError, match="processor does not load"):
        dl.generate(str(model), [QUESTIONS[0]], max_new_tokens=COUNT, dtype="fp32")


def test_inspect_says_what_takes_pictures(base, runs, capsys):
    from dschat_lora.addons.inspect.verbs import inspect

    for path in (base, runs[0] / "adapter"):
        inspect([str(path)])
        assert "text and pictures, by a processor with PIL" in capsys.readouterr().out


def test_the_audit_counts_pictures_and_shows_their_places(base, rows):
    given = [
        {"messages": [*QUESTIONS[3], {"role": "assistant", "content": "Hi"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "See"}]},
                {"role": "assistant", "content": "A cat"},
            ],
            "images": ["a.png"],
        },
    ]
    audit = dl.audit(rows(*given), str(base), show=2)
    counts = [audit.counts[f"{name}pictures"] for name in ("", "rows_with_", "tokens_of_")]
    assert counts == [1, 1, 4]
    share = 4 / audit.counts["tokens"]
    assert f"pictures     1 in 1 row, 4 tokens ({share:.1%})" in audit.text
    assert "<start_of_image>|[picture a.png, 4 tokens]|<end_of_image>" in audit.text
    assert max(audit.samples[1]["input_ids"]) < FIRST_ID


def test_plan_counts_the_part_that_sees_where_rows_have_pictures(base, stock, rows, tmp_path):
    row = {"prompt": "<image>What?", "completion": "A cat", "images": ["a.png"]}
    text = {"prompt": "What?", "completion": "A cat"}
    options = {"max_seq_len": 64, "dtype": "fp32", "data_output_path": str(tmp_path / "cache")}
    pictured, texts = (
        dl.plan("sft", str(base), rows(*[each] * 8), eval_ratio=0.0, **options)
        for each in (row, text)
    )
    parts = ("vision_tower", "multi_modal_projector")
    size = sum(p.nbytes for part in parts for p in getattr(stock.bare.model, part).parameters())
    assert pictured.facts["roles"]["pictures"]["weights"] == size
    assert pictured.facts["peak"] - texts.facts["peak"] == size
    assert pictured.facts["data"]["media"]["tokens_of_pictures"] == 8 * 4
    assert "GiB more where rows are about more than text" in " ".join(str(texts).split())


# The server


def test_two_adapters_and_the_base_answer_pictures_together_as_stock(address, runs, stock):
    openai = pytest.importorskip("openai")
    jobs = [(question, run) for question in QUESTIONS for run in (None, *runs)]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

        def ask(job):
            question, run = job
            answer = client.chat.completions.create(
                model="base" if run is None else run.name,
                messages=as_sent(question),
                extra_body={"return_token_ids": True},
            )
            return answer.choices[0].token_ids, answer.usage.prompt_tokens, answer.prompt_token_ids

        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(ask, jobs))
        for (question, run), (ids, size, prompt) in zip(jobs, answers, strict=True):
            assert (ids, size) == stock.answer(question, COUNT, run=run)
            assert prompt == stock.inputs(question)["input_ids"][0].tolist()
        events = client.chat.completions.create(
            model=runs[0].name,
            messages=as_sent(QUESTIONS[2]),
            stream=True,
            stream_options={"include_usage": True},
        )
        *pieces, usage = events
    whole = chat(address, as_sent(QUESTIONS[2]), runs[0].name)[1]["choices"][0]["message"]
    assert "".join(each.choices[0].delta.content or "" for each in pieces) == whole["content"]
    assert usage.usage.prompt_tokens == stock.answer(QUESTIONS[2], 1)[1]


def image_url(url):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def encoded(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def bomb():
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG")
    return encoded(buffer.getvalue())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (image_url("/etc/hostname"), "must be a data URI; files are not read here"),
        (image_url("file:///etc/hostname"), "must be a data URI; files are not read here"),
        (image_url("http://127.0.0.1:1/a.png"), "--allow_image_urls downloads it"),
        (image_url(encoded(b"no picture")), "it is not PNG"),
        (image_url(data_uri(A)[:200]), "picture"),
        (image_url(bomb()), "50,000,000 are allowed"),
        (image_url(None), "picture"),
        (
            asked("x") * 3 + as_sent(asked(*[drawn(2, 2)] * 65)),
            "65 pictures exceed the limit of 64",
        ),
        (as_sent(asked(A, "<start_of_image>")), "spelt"),
        (as_sent(asked(A, "<image>")), "<image>"),
        ([{"role": "user", "content": "x", "images": [data_uri(A)]}], "'images' is none of its"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "audio"),
        (as_sent(asked(*[A] * 40)), "has room for 200 tokens"),
    ],
)
def test_what_is_no_picture_is_an_error_of_the_request(address, messages, words):
    status, body = chat(address, messages)
    if words == "spelt":  # a token that a user types is text
        assert status == 200
        return
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert words in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


def test_a_body_may_be_as_large_as_pictures_are_and_no_larger(address):
    size = 2**21
    status, body = chat(address, image_url(encoded(bytes(size))))
    assert status == 400, body  # it was read
    assert chat(address, image_url("x" * 2**25))[0] == 413


def test_adapters_of_the_part_that_sees_are_answered_by_generate_and_refused_by_serve(
    base, tmp_path
):
    everywhere = (*LoraConfig().target_modules, ALL_BESIDE)
    run = write_adapter(base, tmp_path / "tower", seed=3, target_modules=everywhere)
    expected = Stock(base, run).answer(QUESTIONS[0], COUNT, run=run)[0]
    assert expected != Stock(base).answer(QUESTIONS[0], COUNT)[0]
    texts = dl.generate(str(run), [QUESTIONS[0]], max_new_tokens=COUNT, dtype="fp32")
    assert texts == [Stock(base).text(expected)]
    with pytest.raises(ValueError, match="merge it and name the merged model"), served(run):
        pass


# Pictures that come one after another


@pytest.fixture
def reader(base):
    tokenizer = load_tokenizer(str(base), ModelConfig())
    return media_reader(None, tokenizer, str(base))


def insert(reader, *pictures):
    values = reader.row({"messages": as_sent(asked(*pictures))}, ["messages"], None)
    text = "<start_of_image>" * len(pictures)
    return reader.insert([text], values, whole=True)[1]


def test_a_picture_is_known_while_a_prompt_holds_it_and_its_ids_are_not_used_again(
    reader, monkeypatch
):
    monkeypatch.setattr(entries, "RECENT", 3)
    pictures = [drawn(8, 8, seed=seed) for seed in range(8)]
    (held,) = insert(reader, pictures[0])
    assert insert(reader, pictures[0]) == (held,)  # its bytes are the same
    others = [insert(reader, each) for each in pictures[1:]]
    assert len(reader.entries) == 8
    firsts = [runs[0].first for runs in others]
    del others
    gc.collect()
    assert [entry.first for entry in reader.entries] == [held.first, *firsts[-3:]]
    (again,) = insert(reader, pictures[1])
    assert again.first > max(firsts)
    assert reader.picture(reader.entry_of(held.first)).tobytes() == pictures[0].tobytes()


def test_a_model_that_has_seen_a_picture_does_not_hold_it(reader, base, monkeypatch):
    monkeypatch.setattr(entries, "RECENT", 3)
    options = ModelConfig(model_name_or_path=str(base))
    model = load_policy(options).model
    model.base_model._forward_pre_hooks.clear()  # of a reader of its own
    reader.attach(model)
    for seed in range(8):
        (run,) = insert(reader, drawn(8, 8, seed=seed))
        model(input_ids=torch.tensor([[1, *range(run.first, run.first + run.size), 2]]))
    assert len(reader.entries) <= 4  # the last one, too


def test_bytes_of_pictures_that_nobody_holds_are_bounded(reader, monkeypatch):
    size = len(base64.b64decode(data_uri(drawn(30, 30)).partition(",")[2]))
    monkeypatch.setattr(entries, "RECENT_BYTES", 3 * size)
    for seed in range(9):
        insert(reader, drawn(30, 30, seed=seed))
    assert len(reader.entries) <= 3


# The terminal


def test_chat_shows_pictures_with_what_is_asked_next(base, runs, stock, tmp_path, capsys):
    from dschat_lora.addons.serving.chat import run_chat
    from dschat_lora.addons.serving.config import ChatConfig

    A.save(tmp_path / "a.png")
    saved = tmp_path / "said.jsonl"
    lines = iter(
        [
            *("/image", f"/image {tmp_path}/none.png", f"/image {tmp_path}/a.png", "What is it?"),
            *(f"/save {saved}", "/quit"),
        ]
    )
    config = ChatConfig(models=(str(runs[0]),), temperature=0.0, max_new_tokens=COUNT)
    run_chat(config, lambda prompt: next(lines))
    said = capsys.readouterr()
    assert "/image needs a file" in said.err
    assert "No such file" in said.err
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0]["content"][0] == {"type": "image", "image": str(tmp_path / "a.png")}
    expected = stock.text(stock.answer(QUESTIONS[0], COUNT, run=runs[0])[0])
    assert messages[1]["content"].strip() == expected.strip()


# The report


def test_the_report_shows_the_pictures_of_prompts_that_are_still_there(tmp_path):
    from dschat_lora.addons.images.pictures import digest
    from dschat_lora.addons.report.html import render_report
    from dschat_lora.addons.report.run_data import read_runs
    from dschat_lora.report.rollout_file import FILE, as_member

    path = tmp_path / "a.png"
    drawn(300, 200).save(path)
    row = {
        **{"iteration": 1, "prompt": "What?", "response": "A cat.", "reward": 1.0},
        **{"rewards": {"r": 1.0}, "advantage": 0.5, "kl": 0.0, "length": 3, "ended": True},
    }
    good = {"digest": digest(path.read_bytes()), "path": str(path)}
    others = [
        {"digest": "0" * 32, "path": str(path)},  # the file has changed
        {"digest": "1" * 32},
        {"digest": "../../etc/passwd"},
        {},
    ]
    rows = [{**row, "media": [good]}, {**row, "response": "A dog", "media": others}]
    (tmp_path / FILE).write_bytes(as_member(rows))
    options = {"data_output_path": str(tmp_path / "cache")}
    (tmp_path / "run.json").write_text(json.dumps({"stage": "rlhf", "config": options}))
    page = render_report("run", read_runs([tmp_path]), {})
    (uri,) = set(re.findall(r'<img src="([^"]*)"', page))
    image = Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert image.size == (96, 64)
    assert len(uri) < 10_000
    assert "img-src data:" in page
