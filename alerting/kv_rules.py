"""Alert rules for the tiers of the KV cache: what is lost there costs computing, never an answer."""

from __future__ import annotations

from typing import Any


def kv_rules() -> list[dict[str, Any]]:
    """Return the rules; a tier that is off has no series, and no alert."""
    failed = " + ".join(
        f'increase(quaver_kv_tier_{what}_total{{tier="disk"}}[5m])' for what in ("errors", "late")
    )
    return [
        {
            "alert": "QuaverKvCorrupt",
            "expr": "increase(quaver_kv_tier_corrupt_total[15m]) > 0",
            "labels": {"severity": "warning", "team": "sre"},
            "annotations": {
                "summary": "KV blocks of {{ $labels.tier }} came back damaged; their tokens are computed",
                "action": "Check the disk under QUAVER_KV_DISK_DIR; answers are not affected",
            },
        },
        {
            "alert": "QuaverKvDiskFailing",
            "expr": f"{failed} > 0",
            "for": "10m",
            "labels": {"severity": "warning", "team": "sre"},
            "annotations": {
                "summary": "The disk tier of the KV cache fails or is late; prompts wait for it in vain",
                "action": "See errors and late loads at GET /quaver/tiers; QUAVER_KV_DISK_DIR can be unset",
            },
        },
    ]
