"""How a thread brings stages out of their files. No GPU is here: streams and events note what is asked of
them, and everything happens at once; tests/test_stream_gpu.py has the real ones."""

import os
import threading
from contextlib import contextmanager

import pytest
import torch

from tests import bench
from tests.run.models import deep
from tests.run.stream.test_executor import CUTS
from weftune.base.host.streamed import load_streamed
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError
from weftune.run.stream import weights as module
from weftune.run.stream.weights import Streamer


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
    """A streamer over mapped files with a reader, its stages held back; what came beside is noted."""
    for name, made in {
        "Event": NotedEvent,
        "Stream": NotedStream,
        "stream": on,
        "current_stream": current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    deep("llama", torch.float32).save_pretrained(tmp_path)
    spec = BaseSpec(model=str(tmp_path), dtype="float32")
    base = load_streamed(spec, bench.CPU, CUTS["a layer at a time"], mapped=True)
    copied, beside = [], []
    for stage, source in base.sources.items():
        base.sources[stage] = Held(source, stage, copied)
    streamer = Streamer(base, beside.append, lambda stage: None)
    streamer._queue = module._ReadQueue(streamer)
    yield streamer, copied, beside
    for source in base.sources.values():
        source.go.set()
    streamer._queue._reader.shutdown()


def test_a_load_returns_at_once_and_a_use_waits_for_all_of_the_stage(queue):
    streamer, copied, beside = queue
    streamer.load(0)
    streamer.load(1)
    assert (copied, beside) == ([], [0, 1])
    release = threading.Timer(0.1, streamer.base.sources[0].go.set)
    release.start()
    streamer.use(0)
    assert copied == [0]
    weight = streamer.base.whole.model.base_model.layers[0].self_attn.q_proj.weight
    assert bool(weight.any())
    streamer.base.sources[1].go.set()
    streamer.use(1)
    assert copied == [0, 1]


def test_stages_come_in_the_order_of_their_loads(queue):
    streamer, copied, _ = queue
    streamer.load(0)
    streamer.load(1)
    streamer.base.sources[1].go.set()
    assert copied == []
    streamer.base.sources[0].go.set()
    streamer.use(1)
    assert copied == [0, 1]


def test_a_stage_is_copied_when_its_slot_is_free_and_used_when_it_has_come(queue):
    streamer, _, _ = queue
    pages = streamer._queue._pages
    for source in streamer.base.sources.values():
        source.go.set()
    streamer.load(0)
    streamer.load(1)
    streamer.use(0)
    streamer.use(1)
    streamer.evict(0)
    left = streamer._queue._out.asked[-1]
    streamer.load(2)
    streamer.use(2)
    assert left[0] == "record"
    asked = pages.asked[-3:]
    assert asked[:2] == [("wait", left[1]), ("copy", 2)]
    there = asked[2]
    assert there[0] == "record"
    # The arithmetic waits for the stage, and for what came beside it, which waited for the slot, too.
    waited, beside = current().asked[-2:]
    assert waited == ("wait", there[1])
    assert beside[1].stream is streamer._queue._in
    assert ("wait", left[1]) in streamer._queue._in.asked


def test_a_file_that_fails_is_told_where_the_stage_is_used(queue, tmp_path):
    streamer, copied, _ = queue
    os.truncate(tmp_path / "model.safetensors", 1000)
    streamer.load(0)
    streamer.base.sources[0].go.set()
    with pytest.raises(BaseModelError, match=r"model\.safetensors has changed"):
        streamer.use(0)
    assert copied == []
