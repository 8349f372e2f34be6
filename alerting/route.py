"""The evidence of one route: what the evaluator remembers between responses."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal

from alerting.interruptions import OutcomeWindow, TenantCap
from alerting.judge import Verdict
from alerting.limits import L1
from alerting.rules import QuantilePreset, RawPreset, Rules
from alerting.sequential import Bank, BankRecovery, EDetector, RecoveryWindow

Condition = Literal["l1_rate", "joint", "leaving"]

_EPISODE_GAP_S = 30.0  # without a live L1 for so long, interruptions start from nothing
_RECENT = 50
CAP = 10.0  # of the threshold: evidence of long ago is forgotten within a few healthy responses


class RouteEvidence:
    """Detectors, windows and recent L1s of one route. All times are unix seconds of the events."""

    def __init__(self, name: str, rules: Rules, preset: RawPreset | QuantilePreset) -> None:
        self.name = name
        self._rules = rules
        self._preset = preset
        powers, cap = rules.rate.powers, CAP * rules.rate.threshold
        self.l1 = Bank(powers, cap)  # every test of the model's side
        self.calm = Bank(powers, cap)  # frequent tests that are passed too seldom
        self.confidence = Bank(powers, cap)
        self.entropy = Bank(powers, cap)
        self._signal = inputs_of(preset)
        self.interruption = EDetector(powers, cap)
        self.leaving = EDetector(powers, cap)  # interruptions while an L1 is live
        share = preset.l2.tenant_share
        self._cap = TenantCap(share)
        self._live_cap = TenantCap(share)
        window_s = preset.l2.window_s if isinstance(preset, RawPreset) else preset.l2.live_s
        self._window = OutcomeWindow(window_s, share)
        size = rules.rate.recover_responses
        self.recovery: dict[Condition, tuple[BankRecovery | None, RecoveryWindow | None]] = {
            # responses since each alert began: the model's side, the users' side
            "l1_rate": (BankRecovery(size), None),
            "joint": (BankRecovery(size), RecoveryWindow(size // 2)),
            "leaving": (None, RecoveryWindow(size // 2)),
        }
        self.live_interruptions = 0
        self.live_responses = 0
        self.live_until = 0.0
        self.last_response = 0.0
        self.recent: deque[bool] = deque(maxlen=_RECENT)
        self.recent_ids: deque[str] = deque(maxlen=5)
        self.lost: deque[bool] = deque(maxlen=_RECENT)  # whether telemetry lost part of a response
        self.rate: float | None = None
        self.basis = "none"
        self.unscored = 0
        self.traffic_changed = False  # so that people do not take other questions for a fault

    def add_l1(self, request_id: str, time: float) -> None:
        """A response raised an L1."""
        self.recent_ids.append(request_id)
        self.keep_live(time)

    def keep_live(self, time: float) -> None:
        """The response of a live L1 still streams."""
        if time - self.live_until > _EPISODE_GAP_S:
            self._forget_episode()
        self.live_until = max(self.live_until, time + self._preset.l2.live_s)

    def is_live(self, now: float) -> bool:
        """Return whether an L1 is live."""
        return now <= self.live_until

    def add_response(self, verdict: Verdict, time: float, *, l1_frozen: bool, joint_frozen: bool) -> None:
        """A judged response ended. Detectors whose alert fires already are frozen."""
        self.last_response = time
        self.unscored = 0
        self.basis = verdict.basis
        self.recent.append(verdict.l1)
        self.rate = verdict.rates.get(L1)
        if self.rate is None:
            return
        for model, _ in self.recovery.values():
            if model is not None and not verdict.partial:
                model.add(verdict.tests, verdict.rates)
        self.calm.update(
            {name: not verdict.tests[name] for name in verdict.calm if name in verdict.tests}, verdict.calm
        )
        if not l1_frozen:
            self.l1.update(verdict.tests, verdict.rates)
        if not joint_frozen:
            for signal, bank in (("confidence", self.confidence), ("entropy", self.entropy)):
                rates = {name: r for name, r in verdict.rates.items() if self._signal.get(name) == signal}
                bank.update(verdict.tests, rates)

    def add_outcome(
        self, tenant: str, interrupted: bool, time: float, p0: float, *, joint_frozen: bool
    ) -> None:
        """A user saw a response to its end, or broke it off."""
        self.last_response = max(self.last_response, time)
        self._window.add(time, tenant, interrupted)
        if self._cap.allows(tenant, interrupted, time):
            for _, window in self.recovery.values():
                if window is not None:
                    window.add(interrupted, p0)
            if self.rate is not None and not joint_frozen:
                self.interruption.update(interrupted, p0)
        if self.is_live(time) and self._live_cap.allows(tenant, interrupted, time):
            self.leaving.update(interrupted, p0)
            self.live_responses += 1
            self.live_interruptions += interrupted

    def users_leave(self, now: float, p0: float) -> bool:
        """Return whether the L2 condition holds: a live L1, and interruptions risen with it."""
        rule = self._preset.l2
        if not self.is_live(now):
            return False
        if isinstance(self._preset, RawPreset):
            interrupted, responses = self._window.counts(now)
            if responses < rule.min_responses or interrupted < rule.min_interruptions:
                return False
            return interrupted / responses > self._preset.l2.ratio * p0
        return (
            self.live_responses >= rule.min_responses
            and self.live_interruptions >= rule.min_interruptions
            and self.l1.value >= self._preset.l2.model_evidence
            and self.leaving.value >= self._rules.rate.threshold
        )

    @property
    def too_calm(self) -> bool:
        """Whether answers are surer than the baseline's: it is old, or something holds them down."""
        return self.calm.value >= self._rules.rate.threshold

    def began(self, condition: Condition) -> None:
        """An alert began: its way back is judged by what comes now."""
        for window in self.recovery[condition]:
            if window is not None:
                window.clear()

    def recovered(self, condition: Condition) -> bool:
        """Return whether enough responses since an alert began are within the healthy range."""
        level = self._rules.rate.recover_level
        return all(w.full and w.healthy(level) for w in self.recovery[condition] if w is not None)

    def mixture(self) -> float:
        """Return the weighted evidence of the three joint inputs; 0 for a raw preset."""
        if isinstance(self._preset, RawPreset):
            return 0.0
        weights = self._preset.mixture
        return (
            weights.confidence * self.confidence.value
            + weights.entropy * self.entropy.value
            + weights.interruption * self.interruption.value
        )

    def restart(self, condition: Condition) -> None:
        """An alert ended: its detectors start from nothing."""
        if condition == "l1_rate":
            self.l1.reset()
        elif condition == "joint":
            for detector in (self.confidence, self.entropy, self.interruption):
                detector.reset()
            self._cap.reset()
        else:
            self._forget_episode()

    def evidence(self) -> dict[str, Any]:
        """Return what speaks for an alert, for people to read."""
        return {
            "l1_recent": sum(self.recent),
            "responses_recent": len(self.recent),
            "degraded_recent": sum(self.lost),
            "healthy_l1_rate": self.rate,
            "limits_of": self.basis,
            "traffic_changed": self.traffic_changed,
            "log_evidence": self.logs(),
            "interruptions_live": self.live_interruptions,
            "responses_live": self.live_responses,
            "requests": list(self.recent_ids),
        }

    def logs(self) -> dict[str, float]:
        """Return ln of the evidence by signal."""
        return {
            "l1": round(self.l1.log, 3),
            "confidence": round(self.confidence.log, 3),
            "entropy": round(self.entropy.log, 3),
            "interruption": round(self.interruption.log, 3),
            "leaving": round(self.leaving.log, 3),
            "mixture": round(math.log(max(self.mixture(), 1.0)), 3),
        }

    def _forget_episode(self) -> None:
        self.leaving.reset()
        self._live_cap.reset()
        self.live_interruptions = self.live_responses = 0


def inputs_of(preset: RawPreset | QuantilePreset) -> dict[str, str]:
    """Return which of the joint inputs each test belongs to."""
    if isinstance(preset, RawPreset):
        return {}
    return {test: statistic.signal for test, statistic, _ in preset.tests()}
