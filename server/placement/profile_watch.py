"""Has models measured again whose profiles are noisy or disagree with their executions, as after a busy start."""

import asyncio
import logging

from cohabit.runtime.profiling.stopwatch import NOISY
from cohabit.server.engine.compute_lanes import ComputeLanes
from cohabit.server.placement.device_memory import PlacedModel
from cohabit.server.placement.placement import ModelPlacement

_log = logging.getLogger("cohabit.profiles")

INTERVAL_S = 60.0
IDLE_SHARE = 0.1
"""Of the time: where lanes have computed for less, the server is quiet enough to measure."""
DISAGREEING = 1.25
"""Measured over predicted time, or its reciprocal, from which a profile is measured again."""


class ProfileWatch:
    """Belongs to the event loop's thread. Each load of a model is measured again once at most."""

    def __init__(self, placement: ModelPlacement, lanes: ComputeLanes) -> None:
        self._placement = placement
        self._lanes = lanes
        self._measured: set[str] = set()
        """Owners of loads that were measured again."""

    async def run(self) -> None:
        """Check profiles after each interval in which little was computed, until cancelled."""
        computed_s = 0.0
        while True:
            await asyncio.sleep(INTERVAL_S)
            before_s, computed_s = computed_s, sum(self._lanes.computed_s.values())
            if computed_s - before_s <= IDLE_SHARE * INTERVAL_S:
                try:
                    await self.check()
                except OSError as error:  # the cache cannot be written
                    _log.warning("profiles are not measured again", extra={"fields": {"reason": str(error)}})

    async def check(self) -> None:
        """Measure and plan the models again that need it, one after the other."""
        placed_models = self._placement.memory.placed_models
        self._measured &= placed_models.keys()
        doubtful = [placed for placed in placed_models.values() if self._is_doubtful(placed)]
        for placed in doubtful:
            self._measured.add(placed.owner)
            await self._placement.improve(placed, again=True)
        if doubtful:
            await asyncio.to_thread(self._placement.preparer.release)

    def _is_doubtful(self, placed: PlacedModel) -> bool:
        if placed.owner in self._measured or placed.prepared.known.is_provisional:
            return False
        correction = self._lanes.of(placed.key).correction(placed.key)
        noise = max(profile.noise for profile in placed.prepared.profiles.values())
        if 1 / DISAGREEING <= correction <= DISAGREEING and noise <= NOISY:
            return False
        fields = {**placed.key.fields, "measured_over_predicted": f"{correction:.2f}", "noise": f"{noise:.0%}"}
        _log.info("the model's profile is in doubt, it is measured again", extra={"fields": fields})
        return True
