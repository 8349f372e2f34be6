"""Which requests a fault acts on. Imports nothing heavy: the model process uses it too."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from engine.messages import RequestMeta
from engine.words import convert

Label = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Header = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^x-[a-z0-9-]{1,60}=.{1,200}$", description="`x-name=value`, compared as the client sent it"
    ),
]


def draw(*parts: object) -> int:
    """Return 64 pseudo-random bits that depend on the parts alone, on any machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request is selected when it satisfies every given condition.

    `share` is a fraction of the requests that satisfy the others, drawn by a hash of fault id,
    request id and seed: all choices and steps of a request fall on the same side. Canaries are
    looked at exactly as traffic is.
    """

    share: Annotated[float, msgspec.Meta(gt=0, le=1, description="fraction of the requests")] = 1.0
    tenant: Label | None = None
    header: Header | None = None
    route: Label | None = None

    def admits(self, meta: RequestMeta) -> bool:
        """Say whether tenant, route and header hold, whatever the share."""
        if self.tenant is not None and meta.tenant != self.tenant:
            return False
        if self.route is not None and meta.route != self.route:
            return False
        if self.header is not None:
            name, _, value = self.header.partition("=")
            return meta.headers.get(name) == value
        return True

    def matches(self, meta: RequestMeta, fault_id: str, seed: int) -> bool:
        """Say whether the fault acts on this request."""
        if not self.admits(meta):
            return False
        return self.share >= 1.0 or draw(fault_id, meta.request_id, seed) < self.share * 2.0**64

    def overlaps(self, other: Selector) -> bool:
        """Say whether one request could be selected by both. Shares never make two disjoint."""
        for mine, theirs in ((self.tenant, other.tenant), (self.route, other.route)):
            if mine is not None and theirs is not None and mine != theirs:
                return False
        if self.header is None or other.header is None:
            return True
        name, _, value = self.header.partition("=")
        other_name, _, other_value = other.header.partition("=")
        return name != other_name or value == other_value

    def to_wire(self) -> dict[str, float | str]:
        """Return the conditions that are set, as `AttachFault.selector` carries them."""
        pairs = msgspec.structs.asdict(self).items()
        return {name: value for name, value in pairs if value is not None}


def parse_selector(raw: dict[str, float | str] | None) -> Selector:
    """Read a selector; raises ValueError that names the field at fault."""
    try:
        return convert(raw or {}, Selector)
    except ValueError as error:
        raise ValueError(f"selector: {error}") from None
