"""Small pipelines and loads for the tests of the stage-time model and of what is decided with it."""

from hypothesis import strategies as st

from benchmarks.studies.fusion import GroupLoad, PipelineCost, Stage, StagePass, one_adapter
from weftune.plan.cost.time import Line

GIB = 1 << 30


FORWARD = StagePass(Line(1.0, 0.01))
BACKWARD = StagePass(Line(2.0, 0.02))


def stage(forward=FORWARD, backward=BACKWARD, budget=1 << 60, shards=1, resident=0) -> Stage:
    return Stage(forward, backward, resident, 10, 1, budget, shards)


def load(job: str, tokens: int, stages: int = 2, seconds: float = 0.0, share: float = 0.5) -> GroupLoad:
    adapter = one_adapter(seconds, 2 * seconds, share)
    return GroupLoad((job,), tokens, tokens * 4, (adapter,) * stages)


@st.composite
def pipelines(draw, tight: bool = True) -> PipelineCost:
    """One to four stages that differ; if `tight`, often without room for all jobs in one group."""
    few = st.floats(0.0, 2.0)
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        passes = [StagePass(Line(draw(few), draw(few) / 50), draw(few) / 1000) for _ in range(2)]
        budget = draw(st.integers(4000, 40_000)) if tight else 1 << 60
        stages.append(Stage(passes[0], passes[1], 100, 10, 1, budget, draw(st.sampled_from([1, 2]))))
    return PipelineCost(tuple(stages), draw(st.integers(1, 8)))


@st.composite
def loads(draw, stages: int, most: int) -> list[GroupLoad]:
    """Jobs of 1 to 90 tokens a microbatch, each with adapters of its own on every stage."""
    made = []
    for number in range(draw(st.integers(1, most))):
        tokens = draw(st.integers(1, 90))
        adapters = tuple(
            one_adapter(draw(st.floats(0, 1)), draw(st.floats(0, 2)), draw(st.floats(0.05, 1.0)))
            for _ in range(stages)
        )
        made.append(GroupLoad((f"job{number}",), tokens, tokens * draw(st.integers(1, 90)), adapters))
    return made
