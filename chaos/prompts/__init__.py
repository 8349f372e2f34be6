"""Our own passage-grounded prompts with known answers."""

from chaos.prompts.families import FAMILIES
from chaos.prompts.generate import ROUTES, generate, stream
from chaos.prompts.item import SPLITS, Item, Split

__all__ = ["FAMILIES", "ROUTES", "SPLITS", "Item", "Split", "generate", "stream"]
