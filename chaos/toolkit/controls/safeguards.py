"""Control: a run starts on a sound server alone, and passes only if its injection was real.

Before: chaos is on and not halted, nothing is in force and (unless `quiet` is false) nothing fires. In
between: a halt of the server interrupts the run, and probes of the method count with their tolerance,
which the toolkit itself looks at in the hypothesis alone. After: what is left is ended, and whatever makes
the run worth nothing turns its status to `failed`; the journal's `quaver` says why. The toolkit gives
every function of a control all of the control's arguments.
"""

from __future__ import annotations

from typing import Any

from chaoslib.exceptions import ActivityFailed, InterruptExecution
from chaoslib.hypothesis import within_tolerance

from chaos.client import ChaosClient
from chaos.toolkit.connection import Configuration, ask, firing
from chaos.toolkit.ledger import LEDGER


def configure_control(**_: Any) -> None:
    """Answer signals from the beginning, on the main thread."""
    LEDGER.guard()


def before_experiment_control(context: Any, configuration: Configuration = None, quiet: bool = True) -> None:
    """Interrupt the run unless the server is sound."""
    try:
        status = ask(configuration, ChaosClient.status)
        alerts = firing(configuration) if quiet else []
    except ActivityFailed as error:
        raise InterruptExecution(f"safeguard: {error}") from error
    in_force = ", ".join(fault["fault_id"] for fault in status["faults"])
    for unsound, why in (
        (not status["enabled"], "chaos is switched off; start the server with QUAVER_CHAOS=1"),
        (
            status["lever"]["blocked"],
            f"chaos is halted ({status['lever']['reason']}); `quaver chaos unblock`",
        ),
        (in_force, f"{in_force} is in force; what this run does could not be told apart"),
        (alerts, f"{alerts and alerts[0]['name']} fires; what this run does could not be told apart"),
    ):
        if unsound:
            raise InterruptExecution(f"safeguard: {why}")


def after_activity_control(
    context: Any, state: Any = None, configuration: Configuration = None, **_: Any
) -> None:
    """Look at how an activity went, and whether the server has halted chaos."""
    _judge(context, state or {}, configuration)
    try:
        why = LEDGER.halted()
    except Exception as error:  # the toolkit drops what a control raises
        LEDGER.flaw(f"the server does not answer: {error}")
        return
    if why is not None:
        LEDGER.flaw(why)
        raise InterruptExecution(f"safeguard: {why}")


def after_experiment_control(context: Any, state: Any = None, **_: Any) -> None:
    """End what is left, and tell the toolkit's journal what the run is worth."""
    if LEDGER.interrupted:
        return
    LEDGER.settle()
    if state is None:
        return
    state["quaver"] = {"valid": not LEDGER.flaws, "flaws": LEDGER.flaws}
    if LEDGER.flaws:
        state["status"] = "failed"
        LEDGER.judged = True


def _judge(activity: dict[str, Any], run: dict[str, Any], configuration: Configuration) -> None:
    name = activity.get("name")
    if run.get("status") == "failed":
        LEDGER.flaw(f"{name!r} failed")
    elif run.get("status") == "succeeded" and "tolerance" in activity:
        output = run.get("output")
        if not within_tolerance(activity["tolerance"], output, configuration=configuration):
            LEDGER.flaw(f"{name!r} gave {output!r}, which is not within its tolerance")
