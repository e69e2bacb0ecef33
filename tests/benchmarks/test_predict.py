"""The cost model answers for a user's own numbers, and knows what bounds a step."""

from dataclasses import replace

import pytest

from benchmarks.predict import METHODS, Setting, check, main, step_seconds
from tests.conftest import ROOT

SETTING = Setting(parameters=1e8, workers=16, rate=1e9, compute=0.5)


def test_a_step_is_never_faster_than_compute_or_wire():
    for method in METHODS.values():
        for rate in (1e7, 1e9, 1e12):
            setting = replace(SETTING, rate=rate, latency=0.0)
            wire = 15 / 16 * 1e8 * method.bits(16) / rate
            assert step_seconds(method, setting) >= max(setting.compute, wire)


def test_fewer_bits_win_on_slow_links_and_messages_and_waits_cost():
    dense, voted = METHODS["ddp_float32"], METHODS["dlion_mavo"]
    slow = replace(SETTING, rate=1e8)
    assert step_seconds(dense, slow) > 5 * step_seconds(voted, slow)
    crowd = replace(SETTING, workers=1024, message=1e-3)
    assert step_seconds(voted, crowd) > 2 * 1023 * 1e-3
    far = replace(SETTING, latency=1.0)
    assert step_seconds(voted, far) > 2 * far.buckets


def test_predictions_are_near_what_was_measured():
    for _, _, method, measured, predicted in check(ROOT / "results" / "speed" / "end_to_end.json"):
        assert predicted == pytest.approx(measured, rel=0.2), method


def test_the_command_answers_and_refuses(capsys, tmp_path):
    main(["--parameters", "1e9", "--workers", "8", "--rate", "10gbit", "--compute", "1"])
    assert "dlion_mavo" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="rate=fast is not a rate"):
        main(["--rate", "fast"])
    with pytest.raises(SystemExit, match="at least 1"):
        main(["--workers", "0"])
    main(["--curves", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
