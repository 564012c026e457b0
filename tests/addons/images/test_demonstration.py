"""Pictures show what their rows say, and stock transformers reads the model that is to learn it."""

import json
from collections import Counter
from itertools import product
from random import Random

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from dschat_lora.addons.images.demonstration import NAMES, draw, write_demonstration

PARTS = {"train": 1440, "prompts": 720, "test": 180}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("demonstration")
    write_demonstration(path)
    return path


def rows_of(folder, part):
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def shown(image):
    """Positions and colours of the pixels that are not of the paper."""
    data = image.tobytes()
    colours = [*zip(data[::3], data[1::3], data[2::3], strict=True)]
    return {(n % 32, n // 32): each for n, each in enumerate(colours) if each != colours[0]}


def test_a_shape_is_of_its_colour():
    wanted = {"red": (208, 48, 48), "green": (32, 138, 48), "blue": (48, 80, 216)}
    wanted["black"] = (32, 32, 32)
    for colour, shape in product(wanted, ("circle", "triangle", "square", "star")):
        for seed in range(3):
            image = draw(f"a {colour} {shape}", Random(seed))
            assert image.size == (32, 32)
            assert Counter(shown(image).values()).most_common(1)[0][0] == wanted[colour]


def test_a_shape_fills_as_much_of_the_circle_around_it_as_geometry_says():
    # Of a circle's area: a triangle 3 sqrt(3) / (4 pi), a square 2 / pi, a star of radii 1 and 0.4
    # ten triangles of 0.4 sin(36 degrees) / 2.
    wanted = {"triangle": 0.4135, "square": 0.6366, "star": 0.3742}
    for seed in range(5):
        dark = {
            shape: sum(1 - min(pixel) / 255 for pixel in drawn.values())
            for shape in ("circle", *wanted)
            if (drawn := shown(draw(f"a black {shape}", Random(seed))))
        }
        for shape, share in wanted.items():
            assert abs(dark[shape] / dark["circle"] - share) < 0.06, shape


def test_the_needle_of_a_gauge_goes_from_left_to_right_with_its_value():
    for seed in range(5):
        tips = []
        for value in range(10):
            drawn = shown(draw(f"a gauge at {value}", Random(seed)))
            needle = [place for place, (r, g, _) in drawn.items() if r > 160 > 110 > g]
            left, right = (edge(x for x, _ in needle) for edge in (min, max))
            # It begins at the dial's middle, which each picture of a seed has in one place.
            tips.append(left if value < 5 else right)
            if value in (0, 9):
                assert right - left >= 8
                assert max(y for _, y in needle) - min(y for _, y in needle) <= 3
        assert tips[:5] == sorted(tips[:5])
        assert tips[5:] == sorted(tips[5:])
        assert tips[4] < tips[5]


def test_a_digit_has_the_more_ink_the_more_segments_of_a_display_it_has():
    segments = [6, 2, 5, 5, 4, 5, 6, 3, 7, 6]  # of a clock, from 0 to 9
    for seed in range(5):
        ink = [len(shown(draw(f"the digit {n}", Random(seed)))) for n in range(10)]
        for a, b in product(range(10), repeat=2):
            assert ink[a] > ink[b] or segments[a] <= segments[b], (a, b)


def test_each_row_has_a_picture_of_its_own_and_a_third_of_the_answers_are_vague(folder):
    paths = set()
    for part, count in PARTS.items():
        rows = rows_of(folder, part)
        assert len(rows) == count
        paths |= {path for row in rows for path in row["images"]}
    assert len(paths) == sum(PARTS.values())
    assert {str(path.relative_to(folder)) for path in (folder / "pictures").iterdir()} == paths
    said = [row["messages"][1]["content"] for row in rows_of(folder, "train")]
    vague = sum(text in ("It is a digit.", "It is a shape.", "It is a gauge.") for text in said)
    assert 0.3 < vague / len(said) < 0.37
    known = {f"It is {name}." for name in NAMES}
    assert {row["answer"] for part in ("prompts", "test") for row in rows_of(folder, part)} == known


def test_the_pictures_of_a_seed_are_the_same_and_those_of_another_differ(folder):
    rng = Random(0)
    first = rows_of(folder, "train")[0]
    names = rng.sample(NAMES * 40, len(NAMES) * 40)
    drawn = draw(names[0], rng)
    assert drawn.tobytes() == Image.open(folder / first["images"][0]).tobytes()
    assert drawn.tobytes() != draw(names[0], Random(1)).tobytes()


def test_stock_transformers_reads_the_model_and_its_processor(folder):
    processor = AutoProcessor.from_pretrained(folder / "model")
    model, loading = AutoModelForImageTextToText.from_pretrained(
        folder / "model", output_loading_info=True
    )
    assert not any(loading.values())
    row = rows_of(folder, "train")[0]
    text = processor.apply_chat_template(row["messages"], tokenize=False)
    assert text.startswith("<|user|><image>What is this?<|end|><|assistant|>It is ")
    image = Image.open(folder / row["images"][0])
    inputs = processor(text=[text], images=[[image]], return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 4
    assert inputs["pixel_values"].shape[-2:] == (32, 32)
    with torch.no_grad():
        logits = model(**inputs).logits
        inputs["pixel_values"] = inputs["pixel_values"].flip(-1)
        assert not torch.equal(model(**inputs).logits, logits)
    words = "Wörter, 猫\n\tand  spaces"
    assert processor.decode(processor.tokenizer(words)["input_ids"]) == words
    tokens = processor.tokenizer.tokenize("It is a green triangle.")
    assert len(tokens) == 6
