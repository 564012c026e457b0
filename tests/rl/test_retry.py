"""When what runs out of GPU memory is computed again, and when what decoding keeps makes room."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dschat_lora.config.options import parse_config
from dschat_lora.rl.draw.own_engine import OwnEngine
from dschat_lora.rl.learn.engines import Retry
from dschat_lora.rl.options.config import RlhfConfig


def engine(*, forward=True, backward=True):
    noted = []
    return SimpleNamespace(
        repeats_forward=forward,
        repeats_backward=backward,
        forget_gradients=lambda: noted.append("forgotten"),
        noted=noted,
    )


def generator(monkeypatch, *, free=0, reserved=0, update=0, keeps=True, version=int):
    """The engine on a GPU with this free memory, which keeps a decoder."""
    memory = {"memory_reserved": reserved, "memory_allocated": 0, "mem_get_info": (free, 100)}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    site = SimpleNamespace(
        config=parse_config(RlhfConfig, []),
        run=SimpleNamespace(log=SimpleNamespace(say=print)),
        trained=SimpleNamespace(device=torch.device("cuda")),
        rollout=nn.Identity(),
        sharded=nn.Identity(),
        ends=frozenset([2]),
        pad_id=1,
        plan=SimpleNamespace(keeps_cache=False, update=update),
        unpacked=None,
        version=version,
    )
    engine = OwnEngine(site)
    engine.emptied = emptied
    if keeps:
        engine._decoders[0], engine._keeps_memory = object(), True
    return engine


def test_merged_rollouts_are_rounded_anew_in_every_iteration(monkeypatch):
    iteration, given = [0], {}
    monkeypatch.setattr(
        "dschat_lora.rl.draw.own_engine.Decoder", lambda **options: given.update(options)
    )
    kept = generator(monkeypatch, version=lambda: iteration[0])
    kept._make_decoder()
    said = []
    for iteration[0] in (0, 3, 3):
        said.append(given["rounding"]())
    assert said == [(1234, 0), (1234, 3), (1234, 3)]


class Full:
    """Runs out of memory the first ``times`` times."""

    def __init__(self, times):
        self.times, self.calls = times, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.calls


def test_a_second_attempt_follows_once_memory_was_given_back(monkeypatch):
    kept, engines = generator(monkeypatch), [engine(), engine()]
    retry = Retry(engines, kept)
    assert retry(Full(0)) == 1
    assert kept.keeps
    assert retry(Full(1), backward=True) == 2
    assert (kept.keeps, kept.released, kept.emptied) == (False, True, [True])
    assert [each.noted for each in engines] == [["forgotten"]] * 2
    # nothing is kept any more
    with pytest.raises(torch.OutOfMemoryError):
        retry(Full(1))


def test_a_forward_pass_drops_no_gradient(monkeypatch):
    own = engine(backward=False)
    assert Retry([own], generator(monkeypatch))(Full(1)) == 2
    assert own.noted == []


@pytest.mark.parametrize(
    ("backward", "keeps", "engines"),
    [
        (False, True, [engine(), engine(forward=False)]),
        (True, True, [engine(), engine(backward=False)]),
        (True, False, [engine()]),
    ],
    ids=["ZeRO 3 of one role", "ZeRO 2 of one role", "nothing to free"],
)
def test_elsewhere_the_first_failure_is_the_last(monkeypatch, backward, keeps, engines):
    compute, kept = Full(1), generator(monkeypatch, keeps=keeps)
    with pytest.raises(torch.OutOfMemoryError):
        Retry(engines, kept)(compute, backward=backward)
    assert compute.calls == 1
    assert kept.keeps == keeps


def test_what_fails_where_processes_meet_is_not_tried_again(monkeypatch):
    retry, compute = Retry([engine()], generator(monkeypatch)), Full(1)

    def meets():
        with retry.collective():
            return compute()

    with pytest.raises(torch.OutOfMemoryError):
        retry(meets, backward=True)
    assert compute.calls == 1


def test_the_first_attempt_is_gone_before_the_second():
    released, held = [], []

    class Kept:
        keeps = True

        def release(self):
            released.append([ref() for ref in held])

    def compute():
        made = torch.zeros(3)
        held.append(weakref.ref(made))
        return Full(len(held) == 1)()

    assert Retry([engine()], Kept())(compute) == 1
    assert released == [[None]]


@pytest.mark.parametrize(("update", "released"), [(12, False), (13, True)])
def test_decoding_gives_way_to_an_update_that_has_no_room(monkeypatch, update, released):
    kept = generator(monkeypatch, free=7, reserved=5, update=update)
    kept.make_room()
    assert kept.released == released
    assert kept.keeps != released
