"""How a thread brings stages out of their files. No GPU is here: streams and events note what is asked of
them, and everything happens at once; tests/test_stream_gpu.py has the real ones."""

import os
import threading
from contextlib import contextmanager

import pytest
import torch

from tests import bench
from tests.run.models import deep
from tests.run.test_streamed import CUTS
from weftune.base.host.streamed import load_streamed
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError
from weftune.run.stream import weights as module
from weftune.run.stream.weights import StreamedWeights


class NotedEvent:
    def __init__(self, enable_timing=False):
        self.stream = None

    def record(self):
        current().record_event(self)

    def query(self):
        return False


class NotedStream:
    def __init__(self, device=None):
        self.asked = []

    def wait_event(self, event):
        self.asked.append(("wait", event))

    def wait_stream(self, other):
        self.asked.append(("wait for", other))

    def record_event(self, event=None):
        event = event or NotedEvent()
        event.stream = self
        self.asked.append(("record", event))
        return event


HERE = threading.local()


def current():
    if not hasattr(HERE, "stream"):
        HERE.stream = NotedStream()
    return HERE.stream


@contextmanager
def on(stream):
    before, HERE.stream = current(), stream
    yield
    HERE.stream = before


class Held:
    """A stage's source that waits until it is let go, and notes when it is copied."""

    blocks = True

    def __init__(self, source, stage, copied):
        self.source, self.stage, self.copied = source, stage, copied
        self.go = threading.Event()
        self.size = source.size

    def copy_to(self, slot):
        assert self.go.wait(20)
        current().asked.append(("copy", self.stage))
        self.source.copy_to(slot)
        self.copied.append(self.stage)


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Weights over mapped files with a reader, its stages held back; what came beside is noted."""
    for name, made in {
        "Event": NotedEvent,
        "Stream": NotedStream,
        "stream": on,
        "current_stream": current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    deep("llama", torch.float32).save_pretrained(tmp_path)
    spec = BaseSpec(model=str(tmp_path), dtype="float32")
    base = load_streamed(spec, bench.CPU, CUTS["a layer at a time"], keeps_files_mapped=True)
    copied, beside = [], []
    for stage, source in base.sources.items():
        base.sources[stage] = Held(source, stage, copied)
    weights = StreamedWeights(base)
    weights.set_callbacks(beside.append, lambda stage: None)
    weights._queue = module._GpuQueue(weights, module._StageReader(weights))
    yield weights, copied, beside
    for source in base.sources.values():
        source.go.set()
    weights._queue._reader._thread.shutdown()


def test_a_load_returns_at_once_and_a_use_waits_for_all_of_the_stage(queue):
    weights, copied, beside = queue
    weights.load(0)
    weights.load(1)
    assert (copied, beside) == ([], [0, 1])
    release = threading.Timer(0.1, weights.base.sources[0].go.set)
    release.start()
    weights.make_readable(0)
    assert copied == [0]
    weight = weights.base.whole.model.base_model.layers[0].self_attn.q_proj.weight
    assert bool(weight.any())
    weights.base.sources[1].go.set()
    weights.make_readable(1)
    assert copied == [0, 1]


def test_stages_come_in_the_order_of_their_loads(queue):
    weights, copied, _ = queue
    weights.load(0)
    weights.load(1)
    weights.base.sources[1].go.set()
    assert copied == []
    weights.base.sources[0].go.set()
    weights.make_readable(1)
    assert copied == [0, 1]


def test_a_stage_is_copied_when_its_slot_is_free_and_used_when_it_has_come(queue):
    weights, _, _ = queue
    pages = weights._queue._reader._copy_stream
    for source in weights.base.sources.values():
        source.go.set()
    weights.load(0)
    weights.load(1)
    weights.make_readable(0)
    weights.make_readable(1)
    weights.evict(0)
    left = weights._queue._evict_stream.asked[-1]
    weights.load(2)
    weights.make_readable(2)
    assert left[0] == "record"
    asked = pages.asked[-3:]
    assert asked[:2] == [("wait", left[1]), ("copy", 2)]
    there = asked[2]
    assert there[0] == "record"
    # The arithmetic waits for the stage, and for what came beside it, which waited for the slot, too.
    waited, beside = current().asked[-2:]
    assert waited == ("wait", there[1])
    assert beside[1].stream is weights._queue._load_stream
    assert ("wait", left[1]) in weights._queue._load_stream.asked


def test_a_file_that_fails_is_told_where_the_stage_is_used(queue, tmp_path):
    weights, copied, _ = queue
    os.truncate(tmp_path / "model.safetensors", 1000)
    weights.load(0)
    weights.base.sources[0].go.set()
    with pytest.raises(BaseModelError, match=r"model\.safetensors has changed"):
        weights.make_readable(0)
    assert copied == []
