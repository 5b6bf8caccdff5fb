"""Page tables: the pages of requests, and the entries that no kernel may read."""

from __future__ import annotations

import pytest
import torch

from flashinfer_trace.families.attention.cases import allocate_pages, distinct_pages, spoil_unused
from flashinfer_trace.harness.inputs import Draws


def test_page_tables():
    table = allocate_pages([9, 0, 4, 5], 4, 9, 1, Draws(0, "cpu"))
    assert [len(pages) for pages in table.pages] == [3, 0, 1, 2]
    assert len({pages[0] for pages in table.pages if pages}) == 1  # the shared prefix: one full page
    assert len({page for pages in table.pages for page in pages}) == 4 == distinct_pages([9, 0, 4, 5], 4, 1)
    assert table.indptr("cpu").tolist() == [0, 3, 3, 4, 6]
    assert table.last_page_len("cpu").tolist() == [1, 0, 4, 1]
    used = table.used("cpu")
    assert used.sum() == 4 + (4 + 1) + 1  # the shared page once, then 5 tokens of the first and 1 of the last request
    cache = torch.ones(9, 4, 2)
    spoil_unused(cache, used, "nan")
    assert torch.equal(cache.isnan().any(-1), ~used)
    few = allocate_pages([9, 9], 4, 2, 0, Draws(0, "cpu"))
    assert {page for pages in few.pages for page in pages} <= {0, 1}
    with pytest.raises(ValueError, match="num_pages = 0"):
        allocate_pages([1], 4, 0, 0, Draws(0, "cpu"))
