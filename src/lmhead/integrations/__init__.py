"""Adapters for other packages: Hugging Face transformers, PEFT, TRL, verl. Imported on request."""
