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
