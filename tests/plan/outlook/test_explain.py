"""The sentence of a plan on what the backward recomputes, and where the rest waits."""

import pytest

from weftune.plan.outlook.explain import recomputed_sentence
from weftune.plan.program.program import NOTHING, Recompute

SENTENCES = {
    NOTHING: "Nothing is recomputed in the backward: memory suffices.",
    Recompute(recomputes_outputs=True): (
        "Outputs of norms and activations are recomputed in the backward: otherwise memory is short."
    ),
    Recompute(True, 3): "3 layers are recomputed in the backward: otherwise memory is short.",
    Recompute(True, 3, 8192, keeps_attention=True): (
        "3 layers are recomputed in the backward, in tiles of up to 8,192 rows, but not their attention: "
        "otherwise memory is short."
    ),
    Recompute(True, 3, 8192, offloaded_layers=2): (
        "3 layers are recomputed in the backward, in tiles of up to 8,192 rows, and so is their attention; "
        "2 of them keep what they need for that in host memory: otherwise memory is short."
    ),
}


@pytest.mark.parametrize("recompute", SENTENCES, ids=str)
def test_a_plan_says_what_is_recomputed_and_why(recompute):
    assert recomputed_sentence(recompute) == SENTENCES[recompute]
