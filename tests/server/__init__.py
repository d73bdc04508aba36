"""Tests of the server: its door, its worker, its answers, and what a hostile client meets."""
