"""`quaver doctor`."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Examine this installation: one line a finding, with its mend. Changes nothing.

    Exit status 1 where something must be mended before `quaver serve` can work, else 0.
    """
    from quaver.doctor import examine
    from quaver.settings import load_settings

    findings = examine(load_settings())
    colours = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failed": typer.colors.RED}
    for finding in findings:
        label = typer.style(f"{finding.status:<8}", fg=colours[finding.status])
        mend = f" → {finding.mend}" if finding.mend else ""
        typer.echo(f"{label}{finding.subject}: {finding.text}{mend}")
    count = {status: sum(finding.status == status for finding in findings) for status in colours}
    warnings = "1 warning" if count["warning"] == 1 else f"{count['warning']} warnings"
    typer.echo(f"{count['ok']} ok, {warnings}, {count['failed']} failed")
    raise typer.Exit(1 if count["failed"] else 0)
