"""How far the same sums are apart on other processors, with other threads and in other shapes."""

import torch


def assert_same_sums(found, expected, *, terms=4096):
    """Assert that the tensors are sums of the same terms, but for the order of these.

    An element is off by up to ``sqrt(terms)`` units in the last place of the largest one: roundings
    of n additions grow as sqrt(n) (Higham and Mary, doi:10.1137/18M1226312), and small elements are
    sums of large terms. Terms are those of all products after one another: of a tiny model a few
    dozen of each of as many layers.
    """
    unit = torch.finfo(expected.dtype).eps * expected.detach().abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=terms**0.5 * unit)
