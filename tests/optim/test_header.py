"""What the header of a message says, and what all headers say together."""

import torch

from dlion.core.header import Header
from tests.support.properties import given, st


@given(
    st.integers(0, 200).flatmap(
        lambda parameters: st.lists(
            st.tuples(
                st.integers(0, 2**31 - 1),
                st.integers(0, 2**30 - 1),
                st.lists(st.booleans(), min_size=parameters, max_size=parameters),
                st.booleans(),
                st.booleans(),
                st.integers(0, 3),
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_headers_come_back_as_they_were_written(senders):
    header = Header(len(senders[0][2]))
    rows = torch.stack([header.encode(*sender) for sender in senders])
    assert rows.shape == (len(senders), header.nbytes) and header.nbytes % 8 == 0
    read = header.decode(rows)
    steps, checksums, present, flags, slow, saved = zip(*senders, strict=True)
    assert (*read.steps,) == steps and (*read.checksums,) == checksums
    assert (*read.saved,) == saved
    assert read.broken == [None] * len(senders)
    assert read.present == [any(bits) for bits in zip(*present, strict=True)]
    assert (read.flag, read.slow) == (any(flags), any(slow))


def test_a_gradient_that_is_not_finite_is_named_in_place_of_the_step():
    header, norms = Header(3), torch.tensor([1.0, torch.nan, torch.inf])
    rows = torch.stack([header.encode(7, 2**30 - 1, [True] * 3) for _ in range(2)])
    header.mark(rows[0], torch.ones(3))
    header.mark(rows[1], norms)
    read = header.decode(rows)
    assert read.broken == [None, 1] and read.steps[0] == 7
    assert read.checksums == [2**30 - 1] * 2
