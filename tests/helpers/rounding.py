"""How far the same sums are apart on other processors, with other threads and in other shapes."""

import torch


def assert_same_sums(found, expected, *, units=256):
    """Assert that the tensors are sums of the same terms, but for the order of these.

    An element is off by up to ``units`` in the last place of the largest one, for small elements
    are sums of large terms: 64 for 4,096 terms, of all products of a tiny model after one another,
    as roundings grow with the square root (Higham and Mary, doi:10.1137/18M1226312), and four
    times these for layers that enlarge what they are given.
    """
    unit = torch.finfo(expected.dtype).eps * expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=units * unit)


def gradients_of(loss, model):
    """By name, of all that trains; zeros where the loss depends on none of it."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(trained.items(), gradients, strict=True)
    }


def assert_same_gradients(found, expected, *, least=0.0):
    """Of what all gradients together measure, for one that all but vanishes."""
    assert found.keys() == expected.keys()
    whole = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert whole > least
    for name, value in found.items():
        wanted = expected[name]
        assert (value - wanted).norm() <= 1e-5 * max(wanted.norm(), 0.05 * whole), name
