"""On a fake card: the first hour, whose values are made up, and plans beside what is taken."""

import pytest

from dschat_lora.addons.pipeline.placeholders import write_config
from dschat_lora.addons.planning.cards import Card
from dschat_lora.addons.planning.plan_search import plan_stage, planning
from dschat_lora.addons.planning.published import PUBLISHED, published_name
from dschat_lora.perf.launches import count_launches
from fakecuda.test_training import LAYERS, ROWS, random_shape, train
from helpers.spread import ALL

pytestmark = pytest.mark.stage


@pytest.mark.thorough
def test_the_card_is_described_and_a_check_of_its_graphs_runs_to_its_end(fake_device, tmp_path):
    names = ["CUDA graphs on and off: equal tokens"]
    results = fake_device.run("forked_hour:run", directory=str(tmp_path), names=names)
    assert results["machine"]["card"] == "NVIDIA H200"
    assert results["machine"]["capability"] == "9.0"
    assert results["machine"]["dtype"] == "bf16"
    (graphs,) = results["checks"]
    assert not graphs["reason"], graphs
    # any token is as good as another there
    assert graphs["differences"] == [
        {"quantity": "responses with another token", "found": 0, "allowed": 0, "holds": True}
    ], graphs
    assert "First hour on NVIDIA H200" in (tmp_path / "first_hour.html").read_text()


@pytest.mark.thorough
def test_the_first_hour_runs_to_its_end(fake_device, tmp_path):
    results = fake_device.run(
        "forked_hour:run",
        directory=str(tmp_path),
        names=None,
        model="facebook/opt-125m",
        cpu_forks=False,
        timeout=1800,
    )
    assert len(results["checks"]) == 12
    for each in results["checks"]:
        assert each.get("differences"), each
        assert each["reason"] == ""
    # values are made up, and differ from the CPU's
    assert {each["state"] for each in results["checks"][:10]} == {"failed"}
    assert [each["reason"] for each in results["measurements"]] == [""] * 3
    assert all(each["peak_bytes"] > 0 for each in results["measurements"])


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "rank", "recompute"), [ROWS[0], *[ROWS[-1]] * ALL])
def test_a_plan_expects_the_peak_and_says_that_no_smaller_card_is_enough(
    fake_device, tmp_path, shape, rank, recompute
):
    trained = train(fake_device, shape, layers=LAYERS, lora_dim=rank, recompute=recompute)
    fields = dict(PUBLISHED[published_name(shape)])
    fields |= {} if LAYERS is None else {"num_hidden_layers": LAYERS}
    write_config(tmp_path / "model", fields)
    options = {"model_name_or_path": str(tmp_path / "model"), "max_seq_len": 512}
    options |= {"lora_dim": rank, "gradient_checkpointing": recompute}
    with planning() as home:
        card = Card("as large as the peak", trained["peak"])
        plan = plan_stage("sft", options, home, card=card)
    assert 0.9 < plan.plan.peak / trained["peak"] < 1.1
    assert not plan.fits


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
