"""Adapters for other packages: transformers, PEFT, TRL, verl, lm-eval. Imported on request."""
