"""Tests of the page: its golden numbers, and the page itself in a browser."""
