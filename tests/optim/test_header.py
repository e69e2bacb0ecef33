"""What the header of a message says, and what all headers say together."""

import torch

from dlion.core.header import Header
from tests.support.properties import given, st


@given(
    st.integers(0, 200).flatmap(
        lambda parameters: st.lists(
            st.tuples(
                st.integers(0, 2**31 - 1),
                st.binary(min_size=4, max_size=4),
                st.lists(st.booleans(), min_size=parameters, max_size=parameters),
                st.booleans(),
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_headers_come_back_as_they_were_written(senders):
    header = Header(len(senders[0][2]), extra=4)
    rows = torch.stack([header.encode(*sender) for sender in senders])
    assert rows.shape == (len(senders), header.nbytes) and header.nbytes % 8 == 0
    read = header.decode(rows)
    steps, extra, present, flags = zip(*senders, strict=True)
    assert (*read.steps,) == steps and [row.tobytes() for row in read.extra] == [*extra]
    assert read.vetoed == [None] * len(senders)
    assert read.present == [any(bits) for bits in zip(*present, strict=True)]
    assert read.flag == any(flags)
    assert not read.same or len({*map(str, senders)}) == 1


def test_a_gradient_that_cannot_be_used_is_named_in_place_of_the_step():
    header = Header(3, extra=4)
    rows = torch.stack([header.encode(7, b"1234", [True] * 3) for _ in range(2)])
    header.veto(rows[0], torch.ones(3, dtype=torch.bool))
    assert header.decode(rows).same
    header.veto(rows[1], torch.tensor([True, False, False]))
    read = header.decode(rows)
    assert read.vetoed == [None, 1] and read.steps[0] == 7 and not read.same
    assert [row.tobytes() for row in read.extra] == [b"1234"] * 2
