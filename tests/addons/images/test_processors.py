"""Processors assembled without their video part, against the models' own processors."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_torchvision_available

from addons.images.stock_processors import (
    ROWS,
    VALUES,
    conversation,
    digest,
    stock_inputs,
    stock_processor,
    stock_tokens,
)
from addons.images.vlms import SEEING, TORCHVISION, drawn, spread, tiny_vlm
from dschat_lora.addons.images import processors
from dschat_lora.addons.images.processors import PictureProcessor
from dschat_lora.assets import BUNDLED_MODEL

WITHOUT_VIDEO = ("llava_next", "gemma3", "idefics3")  # load everywhere
HERE = (*SEEING, *(TORCHVISION if is_torchvision_available() else ()))
STOCK = json.loads(VALUES.read_text("utf-8"))
PICTURES = [picture for row in ROWS for picture in row]
COUNTS = [len(row) for row in ROWS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a family's tiny model, made once."""
    made = {}

    def directory(family):
        if family not in made:
            made[family] = tiny_vlm(family, tmp_path_factory.mktemp(family))
        return str(made[family])

    return directory


def _load(path):
    return PictureProcessor(path, AutoTokenizer.from_pretrained(path))


def _tokens(processor, path):
    """Of the rows' conversations, by the template and the tokenizer around ``expand``."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [tokenizer.apply_chat_template(conversation(row), tokenize=False) for row in ROWS]
    expanded = [processor.expand(text, row) for text, row in zip(texts, ROWS, strict=True)]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in expanded]


@pytest.mark.parametrize("family", spread(*HERE, smoke=("qwen3_vl",), of=HERE))
def test_tokens_and_tensors_are_those_of_the_models_own_processor(family, saved):
    path = saved(family)
    processor = _load(path)
    assert _tokens(processor, path) == STOCK[family]["tokens"]
    inputs = processor.inputs(PICTURES, COUNTS)
    assert inputs.keys() == STOCK[family]["inputs"].keys()
    for name, tensor in inputs.items():
        shape, dtype, value = STOCK[family]["inputs"][name]
        assert digest(tensor)[:2] == [shape, dtype]
        assert digest(tensor)[2] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("family", WITHOUT_VIDEO)
def test_a_processor_that_loads_here_makes_the_same_tensors(family, saved):
    path = saved(family)
    stock, processor = stock_processor(path), _load(path)
    assert _tokens(processor, path) == stock_tokens(stock) == STOCK[family]["tokens"]
    theirs = stock_inputs(stock)
    assert all(
        torch.equal(tensor, theirs[name])
        for name, tensor in processor.inputs(PICTURES, COUNTS).items()
    )


@pytest.mark.parametrize("family", HERE)
def test_the_model_makes_a_feature_for_each_image_token(family, saved):
    path = saved(family)
    processor = _load(path)
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    wanted = [tokens.count(processor.image_token_id) for tokens in STOCK[family]["tokens"]]
    features = model.model.get_image_features(**processor.inputs(PICTURES, COUNTS)).pooler_output
    assert sum(wanted) == sum(each.shape[:-1].numel() for each in features)
    for row, count in zip(ROWS, wanted, strict=True):
        if row:
            alone = model.model.get_image_features(**processor.inputs(row)).pooler_output
            assert sum(each.shape[:-1].numel() for each in alone) == count


@pytest.mark.parametrize(
    ("family", "placeholder"),
    [
        ("llava_next", "<image>"),
        ("gemma3", "<start_of_image>"),
        ("internvl", "<IMG_CONTEXT>"),
        ("qwen3_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    ],
)
def test_the_placeholder_is_what_the_template_writes(family, placeholder, saved):
    path = saved(family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert PictureProcessor(path, tokenizer).placeholder == placeholder
    # A tokenizer's template that knows no pictures gives way to the processor's.
    image, tokenizer.chat_template = tokenizer.chat_template, "{{ messages[0].content + 'x' }}"
    processor = PictureProcessor(path, tokenizer)
    assert (processor.placeholder, processor.chat_template) == (placeholder, image)


@pytest.mark.parametrize(
    "template",
    [
        "User:{{ '' if image else ' ' }}{{ '<image>' if image }}{{ text }}\nAssistant:",  # smolvlm
        "[INST] {{ '<image>\\n' if image }}{{ text }} [/INST]",  # llava_next
        "{{ '\\n\\n<image>\\n\\n' if image }}{{ text }}",  # gemma4
        "{{ text }} {{ '<image>' if image }}",
    ],
)
def test_the_placeholder_is_found_wherever_the_template_writes_it(template, saved):
    path = saved("smolvlm")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% set parts = messages[0].content %}{% set image = parts|length > 1 %}"
        "{% set text = parts[-1].text %}" + template
    )
    assert PictureProcessor(path, tokenizer).placeholder == "<image>"


@pytest.mark.parametrize(
    ("family", "placeholder"),
    [("llava_next", "<image>"), ("qwen2_5_vl", "<|vision_start|><|image_pad|><|vision_end|>")],
)
def test_without_a_template_the_placeholder_keeps_pictures_apart(
    family, placeholder, saved, tmp_path
):
    """Qwen's positions are counted by runs of image tokens."""
    path = shutil.copytree(saved(family), tmp_path / "bare")
    (path / "chat_template.jinja").unlink()
    assert _load(str(path)).placeholder == placeholder


def test_a_pickled_processor_makes_the_same(saved):
    path = saved("qwen3_vl")
    processor = _load(path)
    again = pickle.loads(pickle.dumps(processor))
    assert _tokens(again, path) == STOCK["qwen3_vl"]["tokens"]
    assert again.described() == processor.described()
    assert torch.equal(
        again.inputs(PICTURES)["pixel_values"], processor.inputs(PICTURES)["pixel_values"]
    )


def test_the_given_tokenizer_stays_as_it_is(saved):
    """gemma4's and idefics3's classes add tokens to theirs."""
    tokenizer = AutoTokenizer.from_pretrained(
        BUNDLED_MODEL, extra_special_tokens={"image_token": "a", "boi_token": "b", "eoi_token": "c"}
    )
    path = saved("gemma4")
    size, before = len(tokenizer), tokenizer.all_special_tokens
    with pytest.raises(
        ValueError, match=f"token 1024 is the image token, but .* has {size} tokens"
    ):
        PictureProcessor(path, tokenizer)
    assert (len(tokenizer), tokenizer.all_special_tokens) == (size, before)


def test_what_is_described_tells_changes_apart(saved, tmp_path):
    path = saved("llava_next")
    described = _load(path).described()
    assert described == json.loads(json.dumps(described))
    assert described["backend"] == "pil"
    for file, field, value in [
        ("preprocessor_config.json", "image_mean", [0.1, 0.1, 0.1]),
        ("processor_config.json", "num_additional_image_tokens", 2),
    ]:
        other = shutil.copytree(path, tmp_path / field)
        fields = json.loads((other / file).read_text("utf-8"))
        (other / file).write_text(json.dumps(fields | {field: value}), encoding="utf-8")
        assert _load(str(other)).described() != described


def test_what_is_kept_of_sizes_tells_their_order(saved):
    processor = _load(saved("qwen3_vl"))
    wide, small = drawn(64, 32), drawn(16, 16)
    text = processor.placeholder + "x" + processor.placeholder
    token = processor._processor.image_token
    for pictures, counts in [((wide, small), [8, 1]), ((small, wide), [1, 8])]:
        parts = processor.expand(text, pictures).split("x")
        assert [part.count(token) for part in parts] == counts


def test_transformers_stays_as_it_is(saved):
    before = processing_smolvlm.num2words
    _load(saved("smolvlm"))
    assert processing_smolvlm.num2words is before


def _nested(pictures, processor):
    return {}, processor | {"image_processor": pictures, "video_processor": {"fps": 2}}


def _fast(pictures, processor):
    return pictures | {"image_processor_type": pictures["image_processor_type"] + "Fast"}, processor


def _without_type(pictures, processor):
    return {n: v for n, v in pictures.items() if n != "image_processor_type"}, processor


@pytest.mark.parametrize("written", [_nested, _fast, _without_type])
def test_files_of_other_releases_make_the_same(written, saved, tmp_path):
    path = saved("qwen3_vl")
    other = shutil.copytree(path, tmp_path / "other")
    names = ("preprocessor_config.json", "processor_config.json")
    before = [json.loads((other / name).read_text("utf-8")) for name in names]
    for name, fields in zip(names, written(*before), strict=True):
        (other / name).unlink()
        if fields:
            (other / name).write_text(json.dumps(fields), encoding="utf-8")
    template = (other / "chat_template.jinja").read_text("utf-8")
    (other / "chat_template.jinja").unlink()
    legacy = json.dumps({"chat_template": template})
    (other / "chat_template.json").write_text(legacy, encoding="utf-8")
    assert AutoTokenizer.from_pretrained(other).chat_template is None
    processor, same = _load(str(other)), _load(path)
    assert processor.described() == same.described()
    assert processor.chat_template == template
    assert torch.equal(
        processor.inputs(PICTURES)["pixel_values"], same.inputs(PICTURES)["pixel_values"]
    )


def test_counts_that_do_not_fit_are_refused_with_both(saved):
    processor = _load(saved("qwen3_vl"))
    two = processor.placeholder * 2
    with pytest.raises(ValueError, match=r"the text has 2 times '<\|image_pad\|>' for 1 pictures"):
        processor.expand(two, [drawn(20, 20)])
    with pytest.raises(ValueError, match="the text has 0 times .* for 1 pictures"):
        processor.expand("none", [drawn(20, 20)])
    with pytest.raises(ValueError, match="the text has 2 times .* for 0 pictures"):
        processor.expand(two, [])
    assert processor.expand("plain", []) == "plain"
    assert processor.inputs([]) == {}


def test_the_token_of_features_is_refused_in_text(saved):
    processor = _load(saved("gemma3"))
    with pytest.raises(ValueError, match="has '<image_soft_token>', which stands for features"):
        processor.expand("<start_of_image> and <image_soft_token>", [drawn(20, 20)])


def test_an_image_token_that_the_processor_does_not_write_is_refused(saved, tmp_path):
    other = shutil.copytree(saved("llava_next"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(
        json.dumps(config | {"image_token_index": 5}), encoding="utf-8"
    )
    processor = _load(str(other))
    with pytest.raises(ValueError, match="writes '<image>' for a picture, but the image token of"):
        processor.expand("<image>", [drawn(20, 20)])


def test_other_types_are_refused_in_one_line(saved, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    with pytest.raises(ValueError, match="of a model of type opt cannot .* llava_next, .* with"):
        PictureProcessor(str(BUNDLED_MODEL), tokenizer)
    monkeypatch.setattr(processors, "is_torchvision_available", lambda: False)
    for family in TORCHVISION:
        with pytest.raises(ValueError, match=f"of type {family} need torchvision, which is not"):
            _load(saved(family))


def test_a_directory_without_its_processor_is_refused_in_one_line(saved, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(saved("gemma3")) / name, tmp_path)
    with pytest.raises(ValueError, match="its processor does not load: ") as caught:
        _load(str(tmp_path))
    assert "\n" not in str(caught.value)
