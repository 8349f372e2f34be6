"""Our own passage-grounded prompts with known answers."""

from chaos.prompts.families import FAMILIES, GROUPS
from chaos.prompts.generate import ROUTES, generate, stream
from chaos.prompts.item import SPLITS, Absent, Item, Split
from chaos.prompts.twins import absent, answered, cited

__all__ = [
    "FAMILIES",
    "GROUPS",
    "ROUTES",
    "SPLITS",
    "Absent",
    "Item",
    "Split",
    "absent",
    "answered",
    "cited",
    "generate",
    "stream",
]
