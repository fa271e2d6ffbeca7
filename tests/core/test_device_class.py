"""The classes of GPUs, and the class of a device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from weftune.core import device_class
from weftune.core.device_class import (
    CLASSES,
    INTERPRETER,
    OLDER,
    class_for_capability,
    get_device_class,
    pretend_device_class,
)
from weftune.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 7)


@pytest.fixture(autouse=True)
def fresh():
    """Forget devices and variables that were read before, and in this test."""
    device_class._pretended_class.cache_clear()
    device_class._class_from_environment.cache_clear()
    yield
    device_class._pretended_class.cache_clear()
    device_class._class_from_environment.cache_clear()


@pytest.fixture
def card(monkeypatch):
    one = SimpleNamespace(capability=(9, 0), shared_memory_per_block_optin=232_448, multi_processor_count=77)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: one)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: one.capability)
    return one


def test_classes_are_ordered_and_only_hopper_is_tested():
    capabilities = [one.capability for one in CLASSES]
    assert capabilities == sorted(set(capabilities))
    assert [one.architecture for one in CLASSES if one.is_tested] == ["sm_90"]


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "sm_120"),
    ],
)
def test_an_unknown_capability_belongs_to_the_nearest_lower_class_and_is_untested(capability, architecture):
    found = class_for_capability(capability)
    assert found.architecture == architecture
    assert found.is_tested == (capability == (9, 0))
    assert found.has_kernels


def test_a_capability_that_is_lower_than_9_0_in_its_minor_number_only_is_not_tested():
    assert not class_for_capability((9, 4)).is_tested


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_that_triton_does_not_support_has_no_kernels(capability):
    assert class_for_capability(capability) == OLDER
    assert not OLDER.has_kernels


def test_a_device_has_its_own_shared_memory_and_multiprocessors(card):
    card.capability, card.shared_memory_per_block_optin = (10, 3), 200_000
    found = get_device_class(CUDA)
    assert (found.architecture, found.shared_memory, found.multiprocessors) == ("sm_100", 200_000, 77)
    assert get_device_class(CPU) == INTERPRETER


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.architecture)
def test_a_gpu_that_pretends_keeps_its_multiprocessors_and_gets_no_more_shared_memory(one, card):
    with pretend_device_class(one):
        found = get_device_class(CUDA)
        assert get_device_class(CPU) == one
    assert found == replace(one, multiprocessors=77)
    card.shared_memory_per_block_optin = 50_000
    device_class._pretended_class.cache_clear()
    with pretend_device_class(one):
        assert get_device_class(CUDA).shared_memory == 50_000
    assert get_device_class(CUDA).architecture == "sm_90"


def test_without_a_gpu_a_cuda_device_pretends_with_the_numbers_of_the_table(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pretend_device_class(class_for_capability((8, 6))):
        assert get_device_class(CUDA) == class_for_capability((8, 6))


def test_a_variable_makes_every_device_pretend(card, monkeypatch):
    monkeypatch.setenv(device_class.VARIABLE, "12.0")
    assert get_device_class(CUDA).architecture == "sm_120"
    assert get_device_class(CUDA).shared_memory == 99 << 10


def test_a_class_that_is_not_known_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv(device_class.VARIABLE, "8.7")
    with pytest.raises(
        UserError, match=r"^WEFTUNE_DEVICE_CLASS is '8.7', .* one of 8.0, 8.6, 8.9, 9.0, 10.0"
    ):
        get_device_class(CPU)
