"""``doctor --first_hour`` on a fake card: values are made up, but every process runs to its end."""

import pytest

pytestmark = pytest.mark.stage


@pytest.mark.thorough
def test_the_card_is_described_and_a_check_of_its_graphs_runs_to_its_end(fake_device, tmp_path):
    names = ["CUDA graphs on and off: equal tokens"]
    found = fake_device.run("fakecuda.hour:run", directory=str(tmp_path), names=names)
    assert found["machine"]["card"] == "NVIDIA H200"
    assert found["machine"]["capability"] == "9.0"
    assert found["machine"]["dtype"] == "bf16"
    (graphs,) = found["checks"]
    assert not graphs["reason"], graphs
    # any token is as good as another there
    assert graphs["differences"] == [
        {"quantity": "responses with another token", "found": 0, "allowed": 0, "holds": True}
    ], graphs
    assert "First hour on NVIDIA H200" in (tmp_path / "first_hour.html").read_text()


@pytest.mark.thorough
def test_the_first_hour_runs_to_its_end(fake_device, tmp_path):
    found = fake_device.run(
        "fakecuda.hour:run",
        directory=str(tmp_path),
        names=None,
        model="facebook/opt-125m",
        cpu_forks=False,
        timeout=1800,
    )
    assert len(found["checks"]) == 12
    for each in found["checks"]:
        assert each.get("differences"), each
        assert each["reason"] == ""
    # values are made up, and differ from the CPU's
    assert {each["state"] for each in found["checks"][:10]} == {"failed"}
    assert [each["reason"] for each in found["measurements"]] == [""] * 3
    assert all(each["peak_bytes"] > 0 for each in found["measurements"])
