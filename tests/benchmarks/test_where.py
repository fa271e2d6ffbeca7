from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import where
from benchmarks.where import KERNELS, KernelEvent, KernelKind, drawn, kind_of, kinds_of, spent, traced

OPS = Path(__file__).parents[2] / "weftune" / "ops"


def in_a_row(*names: str, each: float = 2.0, gap: float = 0.0) -> list[KernelEvent]:
    return [KernelEvent(name, at * (each + gap), each) for at, name in enumerate(names)]


def test_every_triton_kernel_that_the_ops_launch_has_a_kind() -> None:
    sources = [file.read_text() for file in OPS.rglob("*.py")]
    launched = {name for text in sources for name in re.findall(r"(\w+)\[\(.*\)\]\(", text)} - {"kernel"}
    passed_on = re.compile(r"_launch_kernel\(kernels\.\w+\.(\w+)")
    launched |= {name for text in sources for name in passed_on.findall(text)}
    assert {"down", "product", "update", "norm_forward"} <= launched
    assert launched == set(KERNELS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", KernelKind.FROZEN),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", KernelKind.FROZEN),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", KernelKind.FROZEN),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, cutlass::bf16>>",
            KernelKind.ATTENTION,
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", KernelKind.ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", KernelKind.ATTENTION),
        ("Memcpy HtoD (Pinned -> Device)", KernelKind.COPIES),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", KernelKind.COPIES),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
            KernelKind.COPIES,
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", KernelKind.OTHER),
        ("up", KernelKind.ADAPTERS),
        ("void at::native::upsample_nearest2d", KernelKind.OTHER),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, kind: KernelKind) -> None:
    assert kind_of(name) is kind


def test_products_beside_the_loss_are_the_heads_and_no_others() -> None:
    chunk = ["gemm", "target_logprobs", "gemm", "splitk", "memset"]
    names = ["gemm", "norm_forward", *chunk, *chunk, "add", "norm_backward", "gemm"]
    head = [KernelKind.HEAD] * 4 + [KernelKind.COPIES]
    layer = [KernelKind.FROZEN, KernelKind.ELEMENTS]
    assert kinds_of(names) == [*layer, *head, *head, KernelKind.OTHER, *reversed(layer)]


def test_kinds_and_idle_make_up_the_whole_time() -> None:
    found = spent(in_a_row("down", "nvjet", "up", "fmha", "squares", each=2.0, gap=0.5))
    assert found.microseconds == pytest.approx(5 * 2.0 + 4 * 0.5)
    assert found.by_kind[KernelKind.ADAPTERS] == 4.0
    assert found.by_kind[KernelKind.FROZEN] == 2.0
    assert found.by_kind[KernelKind.IDLE] == 2.0
    assert found.by_kind[KernelKind.HEAD] == 0.0


def test_what_runs_beside_something_earlier_counts_only_where_it_is_alone() -> None:
    found = spent(
        [KernelEvent("nvjet", 0.0, 10.0), KernelEvent("Memcpy DtoH", 8.0, 4.0), KernelEvent("add", 9.0, 1.0)]
    )
    assert found.by_kind[KernelKind.FROZEN] == 10.0
    assert found.by_kind[KernelKind.COPIES] == 2.0
    assert found.by_kind[KernelKind.OTHER] == found.by_kind[KernelKind.IDLE] == 0.0


@given(
    st.lists(st.builds(KernelEvent, st.sampled_from([*KERNELS, "nvjet", "add"]), *[st.integers(0, 50)] * 2))
)
def test_the_time_is_from_the_first_start_to_the_last_end_whatever_overlaps(
    events: list[KernelEvent],
) -> None:
    ends = [event.start + event.duration for event in events]
    whole = max(ends) - min(event.start for event in events) if events else 0
    found = spent(events)
    assert found.microseconds == whole
    assert all(time >= 0 for time in found.by_kind.values())
    assert all(one.microseconds >= other.microseconds for one, other in pairwise(found.heaviest))


def test_a_table_names_what_is_of_no_kind() -> None:
    shown = drawn(spent(in_a_row("ds_db", "some_new_kernel", "nvjet", each=1e6)))
    assert re.search(r"adapters' kernels +1,000\.0 +33\.3", shown)
    assert re.search(r"together +3,000\.0 +100\.0", shown)
    assert "other: 1000.0 ms some_new_kernel" in shown


def test_the_second_of_two_runs_is_traced() -> None:
    ran = []

    def run() -> None:
        ran.append(torch.ones(8, 8) @ torch.ones(8, 8) if ran else torch.ones(8).cumsum(0))

    names = {event.name for event in traced(run, torch.device("cpu"))}
    assert len(ran) == 2
    assert "aten::mm" in names
    assert "aten::cumsum" not in names


def test_only_so_many_names_are_kept() -> None:
    found = spent(in_a_row(*[f"kernel {at}" for at in range(99)]))
    assert len(found.heaviest) == where.MOST_NAMES
