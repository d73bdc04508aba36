"""Tests of the server: request checks, worker, responses, hostile clients."""
