"""On a fake card: plans beside what is taken."""

import pytest

from dschat_lora.addons.pipeline.placeholders import write_config
from dschat_lora.addons.planning.plan_search import plan_stage, planning
from dschat_lora.addons.planning.published import PUBLISHED, published_name
from dschat_lora.perf.launches import count_launches
from fakecuda.test_training import LAYERS, ROWS, random_shape, train
from helpers.spread import ALL

pytestmark = pytest.mark.stage


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "rank", "recompute"), [ROWS[0], *[ROWS[-1]] * ALL])
def test_a_plan_expects_the_peak(fake_device, tmp_path, shape, rank, recompute):
    trained = train(fake_device, shape, layers=LAYERS, lora_dim=rank, recompute=recompute)
    fields = dict(PUBLISHED[published_name(shape)])
    fields |= {} if LAYERS is None else {"num_hidden_layers": LAYERS}
    write_config(tmp_path / "model", fields)
    options = {"model_name_or_path": str(tmp_path / "model"), "max_seq_len": 512}
    options |= {"lora_dim": rank, "gradient_checkpointing": recompute}
    with planning() as home:
        plan = plan_stage("sft", options, home, card=None).plan
    assert 0.9 < plan.peak / trained["peak"] < 1.1


@pytest.mark.thorough
@pytest.mark.parametrize("shape", ["opt-1.3b", "llama-3-8b", "qwen3-4b"] if ALL else ["qwen3-4b"])
def test_a_block_launches_as_many_kernels_as_are_counted_by_rule(fake_device, shape):
    def block(launches):
        one, two = map(launches, (1, 2))
        return two - one

    def rule(layers):
        return count_launches(random_shape(shape, layers=layers))

    def steps(layers):
        launched = fake_device.run(
            "fakecuda.programs:decode", shape=shape, layers=layers, length=64, new_tokens=8
        )
        return launched[0]["graph_operations"][0]

    launched = block(lambda n: train(fake_device, shape, layers=n, rows=2, length=128)["launches"])
    assert launched == block(lambda n: rule(n).training)
    assert block(steps) == block(lambda n: rule(n).decoding)
