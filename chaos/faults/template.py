"""A wrong chat template: the messages are as they were, their markup is another model's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from chaos.faults.base import EncodingFault
from engine.hooks import Encoding

#: How other models mark turns, in Jinja.
TEMPLATES = {
    "brackets": "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
    "headings": "{% for m in messages %}### {{ m.role | capitalize }}:\n{{ m.content }}"
    "{% if not loop.last %}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\n\n### Assistant:\n{% endif %}",
    "bare": "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}",
}


class Template(EncodingFault, frozen=True, kw_only=True):
    """Renders a conversation through another model's chat template.

    Text completions have no template and are left alone. The control takes the model's own.
    """

    kind: ClassVar[str] = "template"
    title: ClassVar[str] = "Wrong chat template"
    order: ClassVar[int] = 31
    moves: ClassVar[tuple[str, ...]] = ("sink_mass", "head_kl", "surprisal", "probe accuracy")
    control: ClassVar[dict[str, bool | float]] = {"own": True}

    style: Annotated[Literal["brackets", "headings", "bare"], Meta(description="whose template is taken")] = (
        "brackets"
    )
    own: Annotated[bool, Meta(description="control: the model's own template")] = False

    def encode(self, encoding: Encoding, *, chat: bool, bos: bool) -> Encoding | None:
        if not chat:
            return None
        template = encoding.template if self.own else TEMPLATES[self.style]
        return msgspec.structs.replace(encoding, template=template)
