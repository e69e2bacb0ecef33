"""Inside Lion's box the KKT score falls: theorems 3.6 to 3.8 of arXiv 2404.00438.

For the majority vote (3.6), Lion on the mean gradient (3.7) and the mean of votes (3.8) they bound
the mean over T steps of the expected score by four terms: of the start, (f(x_0) - f*) / (T lr), and
of the first gradient, both over T; of the rate, 4 b1 L lr d / (1 - b2) + 2 L lr d; and of the noise
in the workers' gradients, over sqrt(n) in 3.6 and 3.7, without n in 3.8. These are upper bounds. On
a quadratic the score behaves as each term does. That workers enter the box, and stay in it (3.4),
is tested in tests/training/test_options.py.
"""

import pytest

from tests.support.scripts import script

theory = script("kkt_quadratic")


@pytest.mark.parametrize("method", theory.METHODS)
def test_without_noise_the_score_falls_to_the_term_of_the_rate(method):
    """The terms over T are gone: 1 % of the first score is left, at half the rate half of that."""
    left = []
    for lr in (4e-2, 2e-2):
        found = theory.scores(method, n=2, noise=0.0, lr=lr, steps=int(8 / lr), draws=1)
        assert found.min() >= 0  # as everywhere inside the box
        left.append(found[len(found) * 3 // 4 :].mean() / found[0])
    assert left[0] < 0.03
    assert 0.3 < left[1] / left[0] < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "least", "most"),
    [("g_lion", 0.4, 0.7), ("dlion_mavo", 0.4, 0.7), ("dlion_avg", 0.8, 1.05)],
)
def test_noise_leaves_less_with_more_workers_but_for_the_mean_of_votes(method, least, most):
    """The term of the noise: 1 / sqrt(n) for four times the workers is a half; 3.8 has no n.

    Beside it stands the term of the rate, which n does not change.
    """
    few, many = (
        theory.scores(method, n, noise=6.0, lr=1e-2, steps=400, draws=2)[200:].mean()
        for n in (3, 12)
    )
    assert least < many / few < most
