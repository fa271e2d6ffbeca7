"""Prediction of the time of a window (a few global batches) from a profile or data sheet of the device.

For one worker, the times of its forwards and backwards are summed; for several workers, their schedule is
simulated. If shards divide the layers (tensor parallelism), each attention and each feed-forward has one
all-reduce over the shards in its forward and one in its backward, of as many values as the hidden states
have. Meanwhile the devices are idle, unless two microbatches overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from weftune.core.shapes import JobShape, LayerRange, ModelShape, layer_number, shard_shape
from weftune.plan.cost.prior import DirectionTerms, KindTerms
from weftune.plan.cost.time import (
    CostModel,
    JobShapes,
    PassWork,
    Rate,
    Terms,
    active_parameters_by_job,
    pass_work,
)
from weftune.plan.program.layout import Layout
from weftune.plan.program.prices import SUMS_PER_LAYER, HalfPrice, Link, PassPrice, Prices
from weftune.plan.program.program import NOTHING, ForwardOnly, Program, Recompute
from weftune.plan.program.simulate import Timeline
from weftune.plan.window.pace import LoadPace, simulate_timeline

REPEATED_SUMS = 0.5
"""Fraction of the all-reduces over shards in a layer's forward that are repeated when the layer is
recomputed. A layer has two, and only the first is repeated: the second yields the layer's output, which the
backward needs only if a norm follows."""
ATTENTION = "self_attn"
"""Substring of the module paths of all linears in attention, in the families of models whose layers can run
in halves."""
LAUNCH_SECONDS = 5e-4
"""Assumed seconds that the host takes to launch the kernels of half a layer. Half a layer takes at least this
time if two microbatches overlap, since their passes are not captured as CUDA graphs."""
GRADIENT_BYTES = 4
"""Bytes per adapter parameter of the gradients that are summed over shards and replicas."""


def shared_device_cost(cost: CostModel, terms: DirectionTerms, layout: Layout, layers: int) -> CostModel:
    """Return the time model for stages that run one after another on the same device. Each stage adds the
    fixed time of a pass, and the backward of every stage but the last one recomputes its forward first."""
    others, recomputed = len(layout.stages) - 1, layers - layout.stages[-1].layer_count
    visit, back = Terms(fixed=terms.forward.embedding.fixed), Terms(fixed=terms.backward.embedding.fixed)
    again = terms.forward.layer.multiply_by(recomputed).add(
        terms.forward.adapter.multiply_by(recomputed / layers)
    )
    return replace(
        cost,
        forward=cost.forward.add(visit.multiply_by(others)),
        backward=cost.backward.add(again).add(visit.add(back).multiply_by(others)),
    )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Predictor of the times of forwards and backwards over the stages of a base that several workers
    hold."""

    layers: int
    terms: DirectionTerms
    step: Rate
    link: Link | None = None
    """Link between two workers. None means that sending takes no time."""
    output_bytes: int = 0
    """Bytes per token that a stage sends to the next one, and of the tensors that are summed over shards."""
    shards: int = 1
    """Number of workers among which each layer is divided. The predicted times are those of one such
    worker."""
    divides_vocabulary: bool = False
    """Whether embedding and head are divided among shards too, which requires an all-reduce at both."""
    exchanges_row_maxima: bool = False
    """Whether shards exchange the largest value of each row, so that all round the row to 8-bit floats with
    the same scale."""
    attention_fraction: float = 0.0
    """Fraction of a layer's weights that belongs to attention, by which a layer's time is divided into its
    two halves. Set only if layers are divided into shards."""

    def divide_among_shards(self, shape: ModelShape, shards: int) -> StageTimes:
        """Return the predictor for a base each of whose layers is divided among `shards` workers. The fixed
        times of passes, samples and jobs are not divided."""
        if shards == 1:
            return self
        local = shard_shape(shape, shards)
        adapters = local.values_per_token / shape.values_per_token
        head = local.vocabulary / shape.vocabulary

        def divide_terms(kind: KindTerms) -> KindTerms:
            return replace(
                kind,
                layer=_scale_row_terms(kind.layer, 1 / shards),
                head=_scale_row_terms(kind.head, head),
                adapter=_scale_row_terms(kind.adapter, adapters),
            )

        terms = DirectionTerms(
            *map(divide_terms, (self.terms.forward, self.terms.backward, self.terms.evaluation))
        )
        return replace(
            self,
            terms=terms,
            shards=shards,
            divides_vocabulary=head < 1,
            exchanges_row_maxima=shape.multiplies_stored_format,
            attention_fraction=_attention_fraction(shape),
        )

    def timeline(
        self, program: Program, layout: Layout, shapes: JobShapes, loads: LoadPace | None = None
    ) -> Timeline:
        """Return the timeline of all actions of a program, as predicted by the simulator."""
        return simulate_timeline(program, self._action_prices(program, layout, shapes), loads, self.link)

    def least_seconds(
        self,
        layer_range: LayerRange,
        work: PassWork,
        passes: int,
        recompute: Recompute = NOTHING,
        overlaps: bool = False,
    ) -> float:
        """Return a lower bound on the seconds that a stage takes to train `work`, divided into at least
        `passes` microbatches. `overlaps` is whether all-reduces over shards overlap with computation."""
        layers = layer_range.stop - layer_range.start
        share = min(recompute.recomputed_layers, layers) / layers
        each = ((self.terms.forward, 1.0 + share), (self.terms.backward, 1.0))
        seconds = sum(factor * self._part_seconds(terms, layer_range, work) for terms, factor in each)
        nothing = replace(work, tokens=0, squares=0, samples=0, supervised=0, adapted=0, segments=0)
        fixed = sum(factor * self._part_seconds(terms, layer_range, nothing) for terms, factor in each)
        sums, latency = (self._sum_seconds(layer_range, one) for one in (work, nothing))
        repeated = 2.0 + REPEATED_SUMS * share
        computed = seconds + (passes - 1) * fixed
        summed = repeated * (sums + (passes - 1) * latency)
        return max(computed, summed) if overlaps else computed + summed

    def _action_prices(self, program: Program, layout: Layout, shapes: JobShapes) -> Prices:
        layer_ranges = [LayerRange(stage.start, stage.stop, self.layers) for stage in layout.stages]
        actions = chain.from_iterable(program.devices)
        evaluated = {action.microbatch for action in actions if isinstance(action, ForwardOnly)}
        passes, met = [], active_parameters_by_job(shapes)
        for number, microbatch in enumerate(program.microbatches):
            work = pass_work(microbatch, met)
            passes.append(
                tuple(
                    self._evaluation_price(one, work)
                    if number in evaluated
                    else self._training_price(
                        one, work, self._recomputed_fraction(one, layout, program.recompute)
                    )
                    for one in layer_ranges
                )
            )
        jobs = {batch.job for batch in program.batches}
        step = sum(self.step(1, shapes[job].trainable_parameters) for job in jobs) / max(1, len(jobs))
        return Prices(
            tuple(passes),
            step=step / layout.workers,
            adapter_bytes={
                job: self._exchanged_bytes(shapes[job], layer_ranges, layout.replicas) for job in jobs
            },
            gradient_sum_seconds={job: self._gradient_sum_seconds(shapes[job], layer_ranges) for job in jobs},
        )

    def _evaluation_price(self, layer_range: LayerRange, work: PassWork) -> PassPrice:
        sums = self._sum_seconds(layer_range, work) + self._vocabulary_sum_seconds(layer_range.is_first, work)
        seconds = self._part_seconds(self.terms.evaluation, layer_range, work) + sums
        return PassPrice(seconds, 0.0, self.output_bytes * work.tokens, forward_sum_seconds=sums)

    def _training_price(
        self, layer_range: LayerRange, work: PassWork, recomputed_fraction: float
    ) -> PassPrice:
        """Return the cost of the forward and the backward of a microbatch on a stage. The backward recomputes
        `recomputed_fraction` of the forward."""
        handed, sums = self.output_bytes * work.tokens, self._sum_seconds(layer_range, work)
        forward = self._part_seconds(self.terms.forward, layer_range, work)
        backward = self._part_seconds(self.terms.backward, layer_range, work) + recomputed_fraction * forward
        backward_sum_seconds = (1.0 + REPEATED_SUMS * recomputed_fraction) * sums
        ends = self._vocabulary_sum_seconds(layer_range.is_first + layer_range.is_last, work)
        return PassPrice(
            forward + sums + ends,
            backward + backward_sum_seconds,
            handed,
            handed,
            forward_sum_seconds=sums + ends,
            backward_sum_seconds=backward_sum_seconds,
            forward_half=self._half_price(self.terms.forward, layer_range, work),
            backward_half=self._half_price(self.terms.backward, layer_range, work),
        )

    def _half_price(self, terms: KindTerms, layer_range: LayerRange, work: PassWork) -> HalfPrice | None:
        """Return the cost of the two halves of a layer (attention and feed-forward) that is divided into
        shards."""
        if self.shards == 1:
            return None
        squares = terms.layer.square * work.squares
        rest = terms.layer(work) - squares + terms.adapter(work) / self.layers
        layers = layer_range.stop - layer_range.start
        return HalfPrice(
            attention=squares + self.attention_fraction * rest,
            feed_forward=(1.0 - self.attention_fraction) * rest,
            sum_seconds=self._sum_seconds(layer_range, work) / (SUMS_PER_LAYER * layers),
            launch_seconds=LAUNCH_SECONDS,
        )

    def _recomputed_fraction(self, layer_range: LayerRange, layout: Layout, recompute: Recompute) -> float:
        if not (layout.is_pipeline or layer_range.is_last):
            return 1.0
        layers = layer_range.stop - layer_range.start
        return min(recompute.recomputed_layers, layers) / layers

    def _sum_seconds(self, layer_range: LayerRange, work: PassWork) -> float:
        """Return the seconds of all all-reduces over shards in a forward through the layers of a stage."""
        if self.shards == 1 or self.link is None:
            return 0.0
        return (layer_range.stop - layer_range.start) * self.link.layer_sum_seconds(
            self.output_bytes, work.tokens, self.shards, self.exchanges_row_maxima
        )

    def _vocabulary_sum_seconds(self, ends: int, work: PassWork) -> float:
        """Return the seconds of the all-reduces over shards at the embedding and at the head. `ends` is how
        many of these two the stage has. The embeddings are summed in the forward, the gradients of the last
        hidden states in the backward."""
        if not self.divides_vocabulary or self.link is None:
            return 0.0
        return ends * self.link.all_reduce_seconds(self.output_bytes * work.tokens, self.shards)

    def _gradient_sum_seconds(self, job: JobShape, stages: Sequence[LayerRange]) -> tuple[float, ...]:
        """Return, for each stage, the seconds of the all-reduce over shards of a job's gradient."""
        if self.shards == 1 or self.link is None:
            return ()
        sizes = (GRADIENT_BYTES * job.parameters_in_layers(one) for one in stages)
        return tuple(self.link.all_reduce_seconds(size, self.shards) for size in sizes)

    def _exchanged_bytes(self, job: JobShape, stages: Sequence[LayerRange], replicas: int) -> tuple[int, ...]:
        """Return, for each stage, the bytes of gradients that its worker sends to the other replicas before
        an optimizer step of the job."""
        if replicas == 1:
            return ()
        return tuple((replicas - 1) * GRADIENT_BYTES * job.parameters_in_layers(one) for one in stages)

    def _part_seconds(self, terms: KindTerms, layer_range: LayerRange, work: PassWork) -> float:
        count = layer_range.stop - layer_range.start
        layers = count * terms.layer(work) + count / self.layers * terms.adapter(work)
        # The fixed cost of a pass is counted with the embedding.
        begins = terms.embedding(work) if layer_range.is_first else terms.embedding.fixed
        return begins + layers + (terms.head(work) if layer_range.is_last else 0.0)


def _attention_fraction(shape: ModelShape) -> float:
    """Return the fraction of a layer's weights that belongs to attention."""
    weights = {site.name: site.active_weights for site in shape.sites if layer_number(site.name) is not None}
    attention = sum(count for name, count in weights.items() if ATTENTION in name)
    return attention / max(1, sum(weights.values()))


def _scale_row_terms(terms: Terms, factor: float) -> Terms:
    """Return the coefficients of the time of a pass, where those that depend on the number of rows are
    multiplied by `factor`."""
    return replace(
        terms,
        token=factor * terms.token,
        square=factor * terms.square,
        supervised=factor * terms.supervised,
        adapter=factor * terms.adapter,
    )
