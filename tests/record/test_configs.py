"""A recorded configuration is read without anything outside it."""

import pytest
from omegaconf import OmegaConf

from dlion.suite.record.configs import resolve


def test_values_that_are_looked_up_in_the_configuration_are_filled_in():
    recorded = {
        "optimizer": {
            "name": "dgc",
            "lr": "${methods.${optimizer.name}.lr}",
            "momentum": "${oc.select:momenta.dgc,0.5}",
            "betas": ["${oc.select:beta,0.9}", 0.99],
        },
        "methods": {"dgc": {"lr": 0.2}},
        "dataset": {"path": "here", "source": {"path": "${..path}"}},
        "output_dir": "outputs/${optimizer.name}",
    }
    resolved = resolve(recorded)
    assert resolved["optimizer"] == {
        "name": "dgc",
        "lr": 0.2,
        "momentum": 0.5,
        "betas": [0.9, 0.99],
    }
    assert resolved["dataset"]["source"] == {"path": "here"}
    assert list(resolved) == list(recorded)


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:PLANTED}",
        "x ${oc.env:PLANTED} ${group.name}",
        "${oc.select:nothing,${oc.env:PLANTED}}",
        "${oc.${group.word}:PLANTED}",
        "\\${oc.env:PLANTED}",
        "\\\\${oc.env:PLANTED}",
        "${now:%Y}",
        "${hydra:runtime.output_dir}",
    ],
)
def test_nothing_outside_is_read(monkeypatch, text):
    monkeypatch.setenv("PLANTED", "hunter2")
    group = {"name": "a", "word": "env", "value": text, "again": "${group.value}", "n": "${.name}"}
    resolved = resolve({"group": group, "list": [text]})
    assert "hunter2" not in str(resolved)
    assert resolved["group"]["value"] == text and resolved["list"] == [text]
    assert resolved["group"]["n"] == "a"  # the rest of the group is filled in


def test_a_group_that_looks_up_what_is_not_there_stays_as_it_was_recorded():
    recorded = {"a": {"x": "${nowhere.at.all}", "y": "${.z}", "z": 1}, "b": {"y": "${a.z}"}}
    assert resolve(recorded) == {"a": recorded["a"], "b": {"y": 1}}


def test_interpolations_elsewhere_in_the_process_work_as_before(monkeypatch):
    monkeypatch.setenv("PLANTED", "mine")
    resolve({"a": {"b": "${oc.env:PLANTED}"}})
    assert OmegaConf.create({"a": "${oc.env:PLANTED}"}).a == "mine"


@pytest.mark.parametrize(
    "link",
    [
        "${g.a%d}${g.a%d}",
        "${.a%d}${.a%d}",
        "${oc.select:g.a%d}${oc.select:g.a%d,x}",
        "${g.${names.n%d}}${g.${names.n%d}}",
    ],
)
def test_look_ups_that_double_at_each_step_are_refused(link):
    names = {f"n{i}": f"a{i}" for i in range(50)}
    steps = {f"a{i}": link % (i - 1, i - 1) for i in range(1, 50)}
    with pytest.raises(ValueError, match="looks up"):
        resolve({"names": names, "g": {"a0": "text", **steps}})


def test_look_ups_of_look_ups_are_filled_in():
    few = {f"a{i}": f"${{g.a{i - 1}}}" for i in range(1, 9)}
    assert resolve({"g": {"a0": "text", **few}})["g"]["a8"] == "text"
    assert resolve({"g": {"own": "${g.own}"}})["g"]["own"] == "${g.own}"
