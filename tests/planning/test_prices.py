"""The bound that rules out cuts and states before any walk: never above what a real choice costs."""

from __future__ import annotations

import math

import pytest

from bigbatch.planning.costs import MemoryProfile
from bigbatch.planning.naming import segments_of
from bigbatch.planning.simulate import Simulation
from tests.planning.profiles import equal_blocks, every_choice, random_profile, unet, with_parts
from tests.planning.test_simulate import with_repeated_name

PROFILES = {
    **{f"random {seed}": with_parts(random_profile(seed, num_blocks=2 + seed % 4), seed) for seed in range(20)},
    "equal": equal_blocks(7),
    "skips": unet(),
    "repeated": with_repeated_name(random_profile(7, num_blocks=6)),
}


def costs(profile: MemoryProfile, simulation: Simulation) -> list[tuple[int, float]]:
    """Of every choice the bytes beyond what is always there, and the seconds that it adds."""
    found = []
    for recompute in every_choice(profile):
        segments = segments_of(simulation.chain, recompute)
        room = simulation.peak_of(segments) - simulation.fixed_bytes
        found.append((room, simulation.step_seconds_of(segments) - simulation.plain_seconds))
    return found


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("sizes", [[4], [3, 2], [2, 2, 2]])
def test_no_choice_costs_less_than_the_bound(name, sizes):
    simulation = Simulation(PROFILES[name], sizes)

    for room, seconds in costs(PROFILES[name], simulation):
        for prices in simulation.prices:
            least, price = prices.least(room)
            assert least <= seconds * (1 + 1e-9) + 1e-12
            assert prices.constants(room, price)[0] <= least * (1 + 1e-9) + 1e-9


def test_the_bound_is_near_what_it_costs():
    """Control: in equal blocks it is most of the true cost, so it does rule out, and infinite where nothing fits."""
    profile = equal_blocks(8)
    simulation = Simulation(profile, [64])
    choices = costs(profile, simulation)
    peaks = sorted({room for room, _ in choices})
    shares = []
    for room in peaks[len(peaks) // 3 : -1]:
        least = min(seconds for needed, seconds in choices if needed <= room)
        shares.append(simulation.prices[0].least(room)[0] / least)

    assert 0.5 < sum(shares) / len(shares) <= 1
    assert math.isinf(simulation.prices[0].least(peaks[0] // 3)[0])


def test_the_line_is_the_bound_where_it_touches():
    """At the price of the last byte that is missing, both are the same."""
    profile = with_parts(equal_blocks(8), seed=5)
    simulation = Simulation(profile, [16])
    direct = simulation.peak_of(()) - simulation.fixed_bytes
    for step in range(1, 8):
        least, price = simulation.prices[0].least(direct * (1 - step / 20))
        assert simulation.prices[0].constants(direct * (1 - step / 20), price)[0] == pytest.approx(least)
