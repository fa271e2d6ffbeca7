"""Whatever is said in a chat, its sample is what the template printed, and only answers are supervised."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.conftest import supervised_runs, whole_text
from weftune.data.prepare import prepare
from weftune.data.spec import DataSpec

PIECES = [
    "Hello",
    " ",
    "\n",
    "\n\n",
    "<|im_end|>",
    "<|im_start|>",
    "<|im_",
    "end|>",
    "é",
    "猫",
    "🐈",
    "\ue000",
    "yes",
    ".",
]
SPOKEN = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=SPOKEN, answered=SPOKEN.filter(str.strip), again=SPOKEN.filter(str.strip))
def test_any_chat_survives_and_only_its_answers_are_supervised(smollm2, asked, answered, again):
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answered},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": again},
    ]
    with tempfile.TemporaryDirectory() as cache:
        samples = prepare(DataSpec(rows=[{"messages": messages}]), None, smollm2, Path(cache)).train
        said = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        assert whole_text(samples, 0, smollm2) == "".join(said)
        runs = supervised_runs(samples, 0, smollm2)
        # The prompt's own line break may be one token with the answer's first.
        for run, spoken in zip(runs, (answered, again), strict=True):
            assert run in (f"{spoken}<|im_end|>", f"\n{spoken}<|im_end|>")
        tokens = samples.tokens(0).tolist()
        assert [
            tokens.count(smollm2.convert_tokens_to_ids(mark)) for mark in ("<|im_start|>", "<|im_end|>")
        ] == [4, 4]


def test_the_data_room_needs_neither_torch_nor_transformers():
    code = (
        "import sys, weftune.data.prepare, weftune.data.order\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
