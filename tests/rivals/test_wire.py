"""Wires of entries read back what they wrote, in as many bytes as they promised."""

import torch

from dlion.rivals.wire import Sparse, TopK
from tests.support.properties import given, st


@given(st.integers(0, 300), st.integers(0, 99))
def test_sparse_round_trip(length, seed):
    wire, generator = Sparse(), torch.Generator().manual_seed(seed)
    indices = torch.randint(2**31 - 1, (length,), generator=generator)
    values = torch.randn(length, generator=generator)
    packed = wire.encode((indices, values))
    assert packed.numel() == wire.nbytes(length)
    back = wire.decode(packed, length)
    assert torch.equal(back[0], indices) and torch.equal(back[1], values)


@given(st.integers(0, 9), st.integers(1, 300), st.data())
def test_entries_of_chunks_round_trip(chunks, chunk, data):
    k, bits = data.draw(st.integers(1, chunk)), data.draw(st.sampled_from([2, 16, 32]))
    wire, generator = TopK(chunk, k, bits), torch.Generator().manual_seed(chunk)
    values = torch.randn(chunks, k, generator=generator)
    order = torch.rand(chunks, chunk, generator=generator).argsort(1)
    indices = order[:, :k].sort(1).values
    packed = wire.encode((indices, values))
    assert packed.dtype == torch.uint8 and packed.shape == (wire.nbytes(chunks),)
    back, numbers = wire.decode(packed, chunks)
    assert torch.equal(back, indices)
    if bits != 2:
        assert torch.equal(
            numbers, values.to({16: torch.bfloat16, 32: torch.float32}[bits]).float()
        )
        return
    assert torch.equal(numbers < 0, values < 0)
    for row, found in zip(values.abs(), numbers.abs(), strict=True):
        large = row > row.double().mean()
        for part in (large, ~large):  # all of one size, their mean
            expected = row[part].mean().expand(int(part.sum()))
            torch.testing.assert_close(found[part], expected, rtol=1e-2, atol=0)


def test_entries_of_chunks_cost_as_many_bits_as_an_index_and_a_value_need():
    assert TopK(4096, 64, 32).nbytes(1) * 8 == 64 * (12 + 32)
    assert TopK(4096, 64, 2).nbytes(1) * 8 == 64 * (12 + 2) + 32
    assert TopK(64, 64, 16).nbytes(10) * 8 == 10 * 64 * 16  # all of a chunk: no indices
