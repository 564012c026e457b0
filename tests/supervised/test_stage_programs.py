"""Programs of the supervised stages: what each asks of a model before it is loaded."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.supervised import stages

RUNS = {
    SupervisedConfig: stages.run_sft,
    RewardStageConfig: stages.run_reward,
    DpoStageConfig: stages.run_dpo,
}


@pytest.mark.parametrize("kind", RUNS, ids=lambda kind: kind.stage)
def test_only_the_loss_that_has_the_term_asks_the_model_for_balanced_experts(kind, monkeypatch):
    config = parse_config(kind, ["--router_aux_loss_coef", "0.01"])
    run = SimpleNamespace(config=config, directory=None)
    monkeypatch.setattr(stages, "open_run", lambda *_, **__: nullcontext(run))
    with pytest.raises((ValueError, AttributeError, AssertionError)) as error:
        RUNS[kind](config)
    # The other stages go on to set up, which wants more of a run than this one has.
    assert ("no load-balancing loss" in str(error.value)) == (kind is SupervisedConfig)
