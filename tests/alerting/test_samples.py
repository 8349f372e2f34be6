"""Which healthy responses the heads are fitted to, and how many are left."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from alerting.samples import Sample, to_collect, to_spend
from alerting.scores import Response

KEPT = Response(np.zeros((1, 7), np.float32), [], None)


def healthy(*bands: str, kept: bool = True) -> list[Sample]:
    return [
        Sample(route="qa", band=band, statistics={}, raw_l1=[], kept=KEPT if kept else None) for band in bands
    ]


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_each_band_gives_its_share_however_temperatures_take_turns(bands: int) -> None:
    samples = healthy(*[str(at % bands) for at in range(80 * bands)])
    spent = Counter(samples[at].band for at in to_spend(samples))
    assert spent == {str(band): 20 for band in range(bands)}


def test_what_was_not_kept_whole_is_not_spent() -> None:
    assert to_spend(healthy("greedy", "high", kept=False)) == set()


@pytest.mark.parametrize("count", range(1, 60))
def test_just_as_many_are_to_be_collected_as_leave_enough(count: int) -> None:
    def left(collected: int) -> int:
        return collected - len(to_spend(healthy(*["greedy"] * collected)))

    assert left(to_collect(count)) >= count > left(to_collect(count) - 1)
