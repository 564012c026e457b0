"""Faults that the fake GPU is for, planted one by one: each is caught."""

import pytest

from fakecuda.test_training import check_estimate, waits_of
from helpers.spread import ALL

pytestmark = pytest.mark.stage


def plant(fake_device, fault):
    return fake_device.run("fakecuda.faults:train_with", fault=fault)


def test_without_a_fault_nothing_is_found(fake_device):
    noted = plant(fake_device, "none")
    assert waits_of(noted) == {"read": "event"}
    assert {each.split()[1] for each in noted["products"]} == {"bfloat16"}
    check_estimate(noted)


@pytest.mark.thorough
def test_a_tensor_made_on_the_host(fake_device):
    with pytest.raises(AssertionError, match=r"two different devices|not on.*device|cpu"):
        plant(fake_device, "host tensor")


@pytest.mark.parametrize(
    ("fault", "what"),
    [("item", "item"), *[("mask", "index by a mask"), ("unpinned", "unpinned")] * ALL],
)
def test_a_wait(fake_device, fault, what):
    waits = plant(fake_device, fault)["waits"]
    assert any(what in place and "faults.py" in place for place in waits)


@pytest.mark.thorough
def test_a_product_in_fp32(fake_device):
    assert any(each.endswith("float32") for each in plant(fake_device, "fp32")["products"])


def test_a_doubled_buffer(fake_device):
    with pytest.raises(AssertionError, match="alive at the peak"):
        check_estimate(plant(fake_device, "doubled buffer"))
