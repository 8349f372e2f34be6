from __future__ import annotations

import pytest

from quaver.demo import plan


@pytest.mark.parametrize("rate", [2.0, 3.0, 5.0, 20.0])
def test_plan_fits_the_time_on_a_machine_that_can(rate: float) -> None:
    sizes = plan.make_plan(rate, 540.0)
    assert sizes.fits
    assert sizes.seconds <= 541.0
    assert sizes.clean >= 100
    assert plan.FEW <= sizes.fault <= plan.MANY


def test_slow_machine_keeps_the_clean_windows_and_says_that_it_takes_longer() -> None:
    sizes = plan.make_plan(0.5, 540.0)
    assert (sizes.clean, sizes.fault, sizes.fits) == (100, plan.FEW, False)


def test_calibration_grows_with_the_speed_within_bounds() -> None:
    assert [plan.calibration_size(rate) for rate in (0.1, 2.0, 99.0)] == [160, 240, 360]


def test_every_fault_has_its_control() -> None:
    experiments = plan.experiments()
    assert [e.name for e in experiments] == ["authority", "premise", "truncation", "noise"]
    assert all(e.control != e.params for e in experiments)


def test_parameters_are_valid_faults_within_the_default_caps() -> None:
    from chaos.faults.noise import Noise
    from chaos.faults.registry import parse_fault

    for experiment in plan.experiments():
        for params in (experiment.params, experiment.control):
            assert parse_fault(experiment.kind, params).kind == experiment.kind
    assert Noise.caps["sigma"] >= plan.FINALE_SIGMA
