"""Text towers on a CUDA device train as they do on the CPU. Run with `pytest -m gpu`."""

import pytest
import torch

from tests import bench
from tests.base.folders import wrapper_folder
from tests.base.packs import packed, random_samples
from tests.cases import some_of
from tests.families import WRAPPERS
from weftune import Options, train
from weftune.base.load import load_base
from weftune.base.spec import BaseSpec
from weftune.run.passes.adapted import AdaptedBase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

JOBS = """base: {{model: base, dtype: {dtype}}}
output: out
defaults: {{data: rows.jsonl, steps: 5, batch_size: 3, learning_rate: 0.01, warmup: 0}}
jobs:
- {{name: every, adapter: {{rank: 4}}}}
- {{name: some, adapter: {{rank: 8, targets: [q_proj, v_proj], dropout: 0.1}}}}
"""
CLOSE = {"float32": 1e-3, "bfloat16": 0.03}
"""Of the losses, relative to those of float32 on the CPU."""


# Of the random Qwen3.5 transformers' own gradients in bfloat16 are 80 % off those in float32.
CASES = some_of(
    [(family, dtype) for family in WRAPPERS for dtype in CLOSE if (family, dtype) != ("qwen3_5", "bfloat16")],
    [("gemma3", "bfloat16")],
)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_two_jobs_have_the_losses_that_they_have_on_the_cpu(family, dtype, tmp_path):
    wrapper_folder(tmp_path / "base", family)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w10 w20", "completion": "w30 w40 w50"}\n' * 6)
    for device, asked in (("cpu", "float32"), ("cuda", dtype)):
        (tmp_path / "jobs.yaml").write_text(JOBS.format(dtype=asked))
        train(
            tmp_path / "jobs.yaml", output=tmp_path / device, progress=False, options=Options(device=device)
        )
    for job in ("every", "some"):
        want = bench.losses(tmp_path / "cpu", job)
        assert bench.losses(tmp_path / "cuda", job) == pytest.approx(want, rel=CLOSE[dtype])


@pytest.mark.parametrize("family", WRAPPERS)
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers_is(family, tmp_path):
    """The check at load has passed by then."""
    folder = wrapper_folder(tmp_path, family, torch.bfloat16)
    microbatch = packed(random_samples())
    low = BaseSpec(model=str(folder), dtype="bfloat16")
    exact = load_base(BaseSpec(model=str(folder), dtype="float32"), bench.CPU).hidden(microbatch)
    plain = load_base(low, bench.CPU).hidden(microbatch)
    base = load_base(low, torch.device("cuda", 0))
    assert AdaptedBase(base).is_fused == (family != "qwen3_5")
    got = base.hidden(microbatch.to(base.device)).cpu()
    assert (got.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
