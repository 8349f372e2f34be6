"""Measurements of the engine beside its peers. Not part of the installed package."""
