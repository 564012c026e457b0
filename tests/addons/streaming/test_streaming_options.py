"""What is read while training: what cannot be is refused, large data of the hub is by itself."""

from types import SimpleNamespace

import pytest

from dschat_lora.addons.streaming.loader import StreamedRows
from dschat_lora.addons.streaming.prompts import PromptStream
from dschat_lora.config.addons import through_addons
from dschat_lora.config.options import build_config
from dschat_lora.config.stages import DpoStageConfig, SupervisedConfig
from dschat_lora.report import terminal
from dschat_lora.rl.options.config import RlhfConfig


@pytest.fixture
def streams(monkeypatch, capsys):
    """``streams(stage, options)``: whether the run streams, and what is said of it.

    The hub has ``org/large`` of 900,000 rows of ``train`` and 10 of ``test``, the same again as the
    configuration ``b``, and ``org/unknown``, of which nothing is known.
    """

    def load_dataset_builder(name, config=None):
        if name != "org/large":
            raise ConnectionError("offline")
        assert config in (None, "b")
        sizes = {"train": 900_000, "test": 10}
        splits = {split: SimpleNamespace(num_examples=n) for split, n in sizes.items()}
        return SimpleNamespace(info=SimpleNamespace(splits=splits))

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    monkeypatch.setattr(terminal, "_viewer", None)

    def call(stage, *names, checkpoint=None, **options):
        config = build_config(stage, {"data_path": names, "max_steps": 5} | options)
        if checkpoint:
            object.__setattr__(config, "checkpoint", checkpoint)
        found = through_addons(config, "on_all_ranks")
        # A resumed run takes the options that were typed.
        is_read = found.data.tail is not None
        assert ("streaming" in found.given) == (is_read or "streaming" in options)
        return is_read, capsys.readouterr().out

    return call


TWO = ("org/large", "org/large:b:train")


@pytest.mark.parametrize("stage", [SupervisedConfig, RlhfConfig])
def test_large_data_of_the_hub_is_streamed_and_that_is_said(streams, stage):
    assert streams(stage, *TWO) == (
        True,
        "  note         org/large, org/large:b:train: 1,800,000 rows exceed 1,000,000, so they "
        "are read during training, as with --streaming; --no-streaming prepares them first\n",
    )


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (TWO, {"streaming": False}),
        (TWO, {"max_steps": 0}),
        (TWO, {"data_weights": (1.0, 2.0)}),
        (TWO, {"checkpoint": "out/checkpoints/step-00000001"}),
        (TWO, {"max_source_rows": (100_000,)}),
        (("org/large",), {}),
        (("org/large", "org/large:b:test"), {}),
        (("org/large", "org/unknown"), {}),
        (("org/large",), {"eval_data_path": ("org/large:b:train",)}),
    ],
)
def test_data_that_is_not_known_to_be_large_or_is_needed_whole_is_not(streams, names, options):
    assert streams(SupervisedConfig, *names, **options) == (False, "")


def test_a_loss_that_looks_at_all_pairs_before_is_not_streamed(streams):
    assert streams(DpoStageConfig, *TWO) == (False, "")
    assert streams(DpoStageConfig, *TWO, precompute_ref_log_probs=False)[0]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("has_ended", "step", "said"),
    [(True, 3, ["after step 3"]), (True, 5, []), (False, 3, [])],
    ids=["before the run", "with it", "not at all"],
)
def test_data_that_has_ended_is_said_where_that_ends_the_run(has_ended, step, said):
    lines, record = [], {}
    run = SimpleNamespace(
        config=SimpleNamespace(optim=SimpleNamespace(max_steps=5)),
        record=record,
        log=SimpleNamespace(say=lines.append),
    )
    rows = StreamedRows(None, taken=1, kind="samples", say=lines.append)
    rows.has_ended = has_ended
    rows.record(run, step)
    assert record == {"stream": {"read": {}, "unused": {}}}
    # What was read before a resume is known by the state.
    end = {"iteration": 3, "short": {}, "passes": {}, "end": 3 if has_ended else None}
    options = {"per_iteration": 1, "most": 5, "seed": 0, "iteration": lambda: 3}
    prompts = PromptStream(None, say=lines.append, **options)
    prompts.restore(rows.state() | end)
    prompts.record(run, step)
    expected = ["all data was read --max_repeats times: the run ends " + each for each in said]
    assert lines == 2 * expected
