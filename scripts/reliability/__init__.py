"""Long runs behind docs/reliability.md: each prints a summary and can keep it in a JSON file."""
