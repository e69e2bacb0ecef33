"""States of optimizers: loaded to the bit, or refused."""

import pytest
import torch

from dlion.optim import DLion, GAdamW, LionCub, Signum
from dlion.workers import Workers
from tests.support.methods import of_all
from tests.support.small_model import flat, loss_of, net, samples, train


@of_all
def test_state_dict_resumes_to_the_bit(method, cls, options, tmp_path):
    straight = net()
    expected = train(straight, cls(straight.parameters(), **options), 10)

    model = net()
    optimizer = cls(model.parameters(), **options)
    train(model, optimizer, 5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = net()
    resumed.load_state_dict(weights)
    optimizer = cls(resumed.parameters(), **options)
    optimizer.load_state_dict(state)
    for t in range(5, 10):
        optimizer.zero_grad()
        loss_of(resumed, *samples(t)).backward()
        optimizer.step()
    assert torch.equal(flat(resumed), expected)


def test_state_of_another_spread_or_cut_is_refused():
    workers = Workers(local=2)
    for cls, options in ((DLion, {"aggregation": "avg"}), (LionCub, {})):
        saved = cls(net().parameters(), workers=workers, **options).state_dict()
        with pytest.raises(ValueError, match="workers 0, 1 of 2, but"):
            cls(net().parameters(), **options).load_state_dict(saved)
    saved = DLion(net().parameters(), workers=workers).state_dict()
    with pytest.raises(ValueError, match="bucket_cap_mb, ties and shards"):
        DLion(net().parameters(), workers=workers, bucket_cap_mb=1e-3).load_state_dict(saved)


def test_state_of_another_method_or_with_gaps_is_refused():
    optimizer = DLion(net().parameters())
    with pytest.raises(ValueError, match="has no betas: it is of another method"):
        optimizer.load_state_dict(Signum(net().parameters()).state_dict())
    with pytest.raises(ValueError, match=r"parameter 0 has \{'exp_avg'"):
        optimizer.load_state_dict(GAdamW(net().parameters()).state_dict())
    saved = optimizer.state_dict()
    del saved["state"][1]
    with pytest.raises(ValueError, match=r"saved state of parameter 1 has \{\}"):
        optimizer.load_state_dict(saved)
    one = DLion(net()[0].parameters())
    for ours, other in ((one, optimizer), (optimizer, one)):
        with pytest.raises(ValueError, match=r"groups of \[\d\] param.* into the same model with"):
            ours.load_state_dict(other.state_dict())
