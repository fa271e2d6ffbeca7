"""Attention to the pages of a cache: kernels beside plain torch beside an attention over gathered rows."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from weftune.ops.paged import _run_torch, paged_attention

PAGE = 16
LENGTHS = (1, 16, 17, 50, 133)


def pages(heads, groups, width, device, dtype=torch.float32):
    """Random queries and a cache whose pages lie in no order; rows that nobody has written are NaN."""
    generator = torch.Generator().manual_seed(width)
    table_width = -(-max(LENGTHS) // PAGE)
    count = table_width * len(LENGTHS) + 1
    order = torch.randperm(count, generator=generator)[: table_width * len(LENGTHS)]
    tables = order.view(len(LENGTHS), table_width).to(torch.int32)
    keys, values = (torch.full((count * PAGE, groups, width), torch.nan) for _ in range(2))
    for table, length in zip(tables.long(), LENGTHS, strict=True):
        rows = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        keys[rows], values[rows] = torch.randn(2, length, groups, width, generator=generator)
    q = torch.randn(len(LENGTHS), heads, width, generator=generator)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return [x.to(device) for x in (q.to(dtype), keys.to(dtype), values.to(dtype), tables, lengths)]


def gathered(q, keys, values, tables, lengths, scale=None, window=None):
    """One sequence after the other, by torch's own attention in float64."""
    out = []
    for one, table, length in zip(q.double(), tables.long(), lengths.tolist(), strict=True):
        rows = (table[:, None] * PAGE + torch.arange(PAGE, device=q.device)).flatten()[:length]
        rows = rows if window is None else rows[-window:]
        k, v = (x[rows].double().transpose(0, 1) for x in (keys, values))
        out.append(scaled_dot_product_attention(one[:, None], k, v, scale=scale, enable_gqa=True)[:, 0])
    return torch.stack(out)


@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 2, 16), (8, 8, 24), (6, 1, 64)])
@pytest.mark.parametrize("window", [None, 20])
def test_kernels_and_torch_equal_an_attention_over_gathered_rows(heads, groups, width, window, device):
    given = pages(heads, groups, width, device)
    expected = gathered(*given, scale=0.3, window=window)
    for attend in (paged_attention, _run_torch):
        got = attend(*given, PAGE, 0.3, window, None)
        assert torch.allclose(got.double(), expected, atol=1e-5), attend
        assert not got.isnan().any()


def test_capped_scores_are_those_of_torch(device):
    given = pages(4, 2, 16, device)
    got = paged_attention(*given, PAGE, softcap=0.7)
    assert torch.allclose(got, _run_torch(*given, PAGE, 0.25, None, 0.7), atol=1e-5)
    assert not torch.allclose(got, paged_attention(*given, PAGE), atol=1e-3)
