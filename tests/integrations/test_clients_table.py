"""The table of docs/integrations.md is what a run of the clients gives."""

from __future__ import annotations

import pytest

from integrations.clients import CLIENTS, PAGES, Client, measure, table

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda c: f"{c.group}: {c.name}")
def test_client(client: Client) -> None:
    row = measure(client)
    assert row.same
    assert row.builds == client.builds
    number = CLIENTS.index(client)
    for page, words in PAGES.items():
        assert table(page)[number] == row.markdown(words), page


def test_the_table_has_a_row_for_each_client() -> None:
    for page in PAGES:
        assert len(table(page)) == len(CLIENTS)
