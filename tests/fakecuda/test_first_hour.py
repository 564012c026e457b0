"""``doctor --first_hour`` on a fake card: values are made up, but every process runs to its end."""

import pytest

from helpers.spread import ALL

pytestmark = pytest.mark.stage


def test_checks_by_value_run_to_their_end_and_made_up_values_fail_them(fake_device, tmp_path):
    names = ["sft in bf16 against fp32 on the CPU", "CUDA graphs on and off: equal tokens"]
    found = fake_device.run("fakecuda.hour:run", directory=str(tmp_path), names=names)
    by_value, graphs = found["checks"]
    assert [by_value["name"], graphs["name"]] == names
    assert by_value["reason"] == "", by_value["tail"]
    assert {row["quantity"] for row in by_value["differences"]} == {"loss", "gradient norm"}
    assert by_value["state"] == "failed"
    # any token is as good as another there
    assert graphs["differences"] == [
        {"quantity": "responses with another token", "found": 0, "allowed": 0, "holds": True}
    ], graphs
    assert "fake" in (tmp_path / "first_hour.html").read_text()


@pytest.mark.skipif(not ALL, reason="about five minutes; part of make test-all")
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
        assert each["differences"], each
        assert each["reason"] == ""
    assert [each["reason"] for each in found["measurements"]] == [""] * 3
    assert all(each["peak_bytes"] > 0 for each in found["measurements"])
