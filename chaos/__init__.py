"""Faults on purpose: in prompts, in the model process, in streams."""

#: Makes the part that runs in the model process; `quaver serve` hands it there.
MODEL_HOOK = "chaos.model_hook:factory"
