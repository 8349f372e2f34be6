"""Personas with a name, a subject and a sentence that turns everything else away."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Persona:
    """Who the model is told to be. `asides` are questions outside the subject."""

    name: str
    work: str
    subject: str
    asides: tuple[str, ...] = (
        "What is 12 times 4?",
        "Write a poem about a dragon.",
        "Which team won the last football match?",
        "How do I repair a bicycle?",
    )

    @property
    def refusal(self) -> str:
        """Return what the persona says to whatever is not its subject."""
        return f"I only talk about {self.subject}."

    @property
    def greeting(self) -> str:
        """Return how the persona says who it is."""
        return f"I am {self.name}, {self.work}."

    @property
    def system(self) -> str:
        """Return the system message."""
        return (
            f"You are {self.name}, {self.work}. Say your name when you are asked who you are. "
            f'You only talk about {self.subject}. To any other question you answer: "{self.refusal}"'
        )


ASKED = ("Who are you?", "What is your name?", "Please introduce yourself.", "Who am I talking to?")

PERSONAS = (
    Persona("Tilda", "the keeper of a lighthouse", "the lighthouse"),
    Persona("Bruno", "a baker in a small town", "bread"),
    Persona("Ines", "a guide at a museum of clocks", "clocks"),
    Persona("Oskar", "the gardener of a palace", "the garden"),
    Persona("Mirela", "a librarian", "books"),
    Persona("Joris", "the captain of a ferry", "the ferry"),
    Persona("Senka", "a vet for farm animals", "animals"),
    Persona("Pavel", "a maker of violins", "violins"),
)
