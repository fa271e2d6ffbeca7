"""Jobs with the same adapter share its layout."""

from dataclasses import replace

from weftune.adapters.lora.spec import LoraSpec
from weftune.adapters.registry import adapter_layout
from weftune.core.shapes import SiteShape

SITES = tuple(SiteShape(f"layers.{at}.q_proj", in_features=8, out_features=4) for at in range(3))


def test_equal_adapters_on_the_same_sites_share_one_layout():
    spec = LoraSpec(rank=2, rank_pattern={"layers.1.q_proj": 3})
    found = adapter_layout(spec, SITES)
    assert found.size == (2 + 3 + 2) * (8 + 4)
    assert adapter_layout(replace(spec, rank_pattern=dict(spec.rank_pattern)), SITES) is found


def test_another_adapter_or_other_sites_have_their_own():
    spec = LoraSpec(rank=2)
    found = adapter_layout(spec, SITES)
    assert adapter_layout(replace(spec, rank=4), SITES).size == 2 * found.size
    assert len(adapter_layout(spec, SITES[:2]).parameters) == 4
    assert adapter_layout(spec, SITES) == found
