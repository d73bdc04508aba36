"""Heads for huge vocabularies."""
