"""Vectors of layers that wait in host memory come back unchanged, in the order of the backward."""

import pytest
import torch

from tests.bench import CPU
from weftune.run.passes.host_copies import HostStore


def vectors(count, size=5):
    return [torch.arange(size, dtype=torch.float64) + 10 * number for number in range(count)]


def test_what_is_stored_comes_back_whatever_became_of_the_tensor_on_the_device():
    store, (first, second) = HostStore(CPU), vectors(2)
    fetches = store.store_vector(0, first), store.store_vector(0, second)
    store.free_copied()
    first.zero_()
    second.zero_()
    found = [fetch() for fetch in fetches]
    assert [one.tolist() for one in found] == [one.tolist() for one in vectors(2)]


def test_the_first_vector_of_a_layer_can_be_requested_before_the_others():
    store, given = HostStore(CPU), vectors(3)
    fetches = [store.store_vector(layer, one) for layer, one in zip((0, 1, 1), given, strict=True)]
    store.request(1, count=1)
    assert list(store._incoming_vectors) == [(1, 0)]
    store.request(1)
    assert list(store._incoming_vectors) == [(1, 0), (1, 1)]
    assert [fetch().tolist() for fetch in fetches] == [one.tolist() for one in given]


def test_the_next_microbatch_takes_the_same_host_memory_if_it_suffices():
    store = HostStore(CPU)
    store.store_vector(0, vectors(1)[0])()
    address = store._host_buffers[0, 0].data_ptr()
    store.store_vector(0, vectors(1, size=3)[0])()
    assert store._host_buffers[0, 0].data_ptr() == address
    assert store.store_vector(0, vectors(1, size=50)[0])().tolist() == vectors(1, size=50)[0].tolist()


def test_an_abandoned_microbatch_is_forgotten_and_the_memory_can_be_released():
    store = HostStore(CPU)
    store.store_vector(0, vectors(1)[0])
    with pytest.raises(AssertionError, match="still wait on the host"):
        store.release()
    store.forget()
    store.release()
    assert not store._host_buffers
    assert store.store_vector(0, vectors(1)[0])().tolist() == vectors(1)[0].tolist()
