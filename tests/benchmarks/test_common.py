"""What the benchmarks share: refusals, points that are kept, random order, spreads."""

import json
import runpy
import sys
from collections import Counter

import pytest

from dlion.errors import RunFailed, UserError
from tests.support.runs import python
from tests.support.scripts import BENCHMARKS, script

common = script("common")
OVER_LINKS = ("exchange", "end_to_end", "time_to_accuracy", "soak")


@pytest.mark.parametrize(
    ("name", "typed", "told"),
    [
        ("end_to_end", "--slow-rounds 1", "1 is not a whole number of at least 2"),
        ("end_to_end", "--rounds 0", "0 is not a whole number of at least 2"),
        ("end_to_end", "--rates 100", "100 is not a rate: write a number and a unit"),
        ("end_to_end", "--rates 1e8", "such as 100mbit"),
        ("end_to_end", "--rates 999bit", "at least 1kbit"),
        ("end_to_end", "--models vit", "invalid choice: 'vit'"),
        ("end_to_end", "--study bucket", "invalid choice: 'bucket'"),
        ("end_to_end", "--study workers --workers 1", "1 is not a whole number of at least 2"),
        ("exchange", "--workers 1", "1 is not a whole number of at least 2"),
        ("exchange", "--d -5", "-5 is not a whole number of at least 1"),
        ("exchange", "--rates -100mbit", "expected at least one argument"),
        ("local_step", "--sizes 0", "0 is not a whole number of at least 1"),
        ("local_step", "--threads 1.5", "1.5 is not a whole number"),
        ("local_step", "--output /nowhere/else", "/nowhere/else is not a folder"),
        ("time_to_accuracy", "--steps 20", "20 is not a whole number of at least 30"),
        ("time_to_accuracy", "--target 90", "90 is not a number from 0 to 1"),
        ("time_to_accuracy", "--seeds 0", "0 is not a whole number of at least 1"),
        ("accelerator", "--only kernel", "choose from kernels, steps, train, nccl"),
        ("accelerator", "--device cuda --only steps,", " is not a part"),
        ("soak", "--mean 0", "0 is not a number of at least 0.1"),
        ("soak", "--minutes nan", "nan is not a number of at least 0"),
        ("soak", "--minute", "expected one argument"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(name, typed, told, capsys):
    with pytest.raises(SystemExit) as refused:
        script(name).parse(typed.split())
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("name", ["end_to_end", "local_step", "time_to_accuracy"])
def test_without_the_package_that_is_measured_too_there_is_help_and_a_sentence(
    name, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as helped:
        script(name).parse(["--help"])
    assert helped.value.code == 0
    with pytest.raises(SystemExit) as refused:
        script(name).parse([])
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: lion_pytorch is measured here too: type pip install -e '.[test]'"


def test_what_measures_nothing_by_itself_says_what_does(capsys):
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(BENCHMARKS / "spmd.py"), run_name="__main__")
    assert refused.value.code == 2
    assert "start exchange.py or end_to_end.py" in capsys.readouterr().err


@pytest.mark.parametrize("name", OVER_LINKS)
def test_links_that_cannot_be_emulated_are_refused_but_not_by_the_smoke_form(
    name, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", "")  # so that there is no tc
    with pytest.raises(SystemExit) as refused:
        script(name).parse([])
    assert refused.value.code == 2
    assert "an emulated network needs" in capsys.readouterr().err
    args = script(name).parse(["--smoke"])
    assert not any(args.rates)
    assert "over loopback, as an emulated network needs" in capsys.readouterr().err


@pytest.fixture
def points(tmp_path):
    def make(facts=None, settings=None, fresh=False):
        return common.Points(tmp_path / "points.json", facts or {}, settings or {}, fresh)

    return make


KEYS = [{"rate": 10, "n": 2}, {"rate": 10, "n": 4}, {"rate": None, "n": 2}]


def test_a_point_is_measured_once_and_kept_as_it_comes(points, tmp_path):
    first = points()
    for number, key in enumerate(first.missing(KEYS)):
        if number == 2:
            break  # as if it were interrupted
        first.add(key, [{"case": "a", "seconds": number}, {"case": "b", "seconds": number}])
        assert len(json.loads((tmp_path / "points.json").read_text())["points"]) == 2 * number + 2
    second = points()
    assert list(second.missing(KEYS)) == KEYS[2:]
    second.add(KEYS[2], [{"case": "a", "seconds": 7}])
    assert [row["seconds"] for row in points().rows] == [0, 0, 1, 1, 7]
    assert not list(points().missing(KEYS))
    assert list(points(fresh=True).missing(KEYS)) == KEYS


def test_a_point_of_other_settings_or_code_is_replaced(points, tmp_path):
    points(settings={"rounds": 2}).add(KEYS[0], [{"case": "a"}, {"case": "b"}])
    points(settings={"rounds": 2}).add(KEYS[1], [{"case": "a"}])
    other = points(settings={"rounds": 3})
    assert list(other.missing(KEYS[:2])) == KEYS[:2]
    other.add(KEYS[0], [{"case": "a"}])
    assert [(row["n"], row["settings"]["rounds"]) for row in points().rows] == [(4, 2), (2, 3)]
    file = tmp_path / "points.json"
    file.write_text(file.read_text().replace(other.settings["code"], "earlier"))
    assert list(points(settings={"rounds": 3}).missing(KEYS[:1])) == KEYS[:1]


def test_points_of_other_facts_are_not_mixed_with_ours(points, capsys):
    points(facts={"workers": 4}).add(KEYS[0], [{"case": "a"}])
    assert points(facts={"workers": 8}).rows == []
    assert "is replaced" in capsys.readouterr().err


def test_each_round_has_every_case_in_an_order_of_its_own():
    order = list(common.in_random_order("abcde", rounds=20, warmups=1))
    assert Counter(order) == {(r, name): 1 for r in range(-1, 20) for name in "abcde"}
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    assert len({tuple(name for r, name in order if r == k) for k in range(20)}) > 10


def test_ratios_are_of_the_same_round():
    assert common.ratios([2, 40], [1, 10]) == {"median": 3, "low": 2.5, "high": 3.5, "rounds": 2}


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (UserError("no"), 2),
        (RunFailed("no"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_benchmark_ends_with_one_line_and_a_code(raised, code, capsys, tmp_path):
    def main(args):
        raise raised

    args = script("exchange").parse(["--rates", "loopback", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        common.run(main, args)
    assert left.value.code == code
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_refusals_come_from_the_command_itself():
    done = python("benchmarks/exchange.py", "--rounds", "1")
    assert done.returncode == 2
    assert done.stderr == "error: argument --rounds: 1 is not a whole number of at least 2\n"
