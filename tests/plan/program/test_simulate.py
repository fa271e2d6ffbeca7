"""The simulator against sums that can be done by hand."""

from dataclasses import replace
from time import process_time

import pytest

from tests.cases import is_within
from tests.plan.works import even_prices, work
from weftune.plan.program.prices import (
    HalfPrice,
    Link,
    PassPrice,
    PricedCluster,
    Prices,
)
from weftune.plan.program.program import (
    Backward,
    BackwardHalf,
    Evict,
    Forward,
    ForwardHalf,
    Load,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
)
from weftune.plan.program.simulate import Lane, Level, Span, simulate
from weftune.plan.window.orders import multi_job, one_forward_one_backward
from weftune.plan.window.overlap import overlap_microbatches


def start_and_stop(timeline, action):
    return [(one.start, one.stop) for one in timeline.events if one.action == action]


def test_one_microbatch_pays_every_pass_every_hop_and_the_word_for_the_step():
    price = PassPrice(2.0, 3.0, activation_bytes=100, gradient_bytes=50)
    cluster = PricedCluster(2, Link(bandwidth=100.0, latency=0.25))
    timeline = simulate(
        one_forward_one_backward(work(1, 1, 1), 2), Prices(((price, price),), step=0.5), cluster
    )
    assert start_and_stop(timeline, Send(0, 1, "activation", 1)) == [(2.0, 3.25)]
    assert start_and_stop(timeline, Recv(0, 1, "activation", 0)) == [(2.0, 3.25)]
    assert start_and_stop(timeline, Backward(0, 1)) == [(5.25, 8.25)]
    assert start_and_stop(timeline, Send(0, 0, "gradient", 0)) == [(8.25, 9.0)]
    assert start_and_stop(timeline, Step("job0", 1)) == [(12.0, 12.5), (12.25, 12.75)]
    assert timeline.makespan == 2.0 + 1.25 + 2.0 + 3.0 + 0.75 + 3.0 + 0.25 + 0.5
    assert timeline.busy_fractions() == (5.5 / 12.75, 5.5 / 12.75)
    assert timeline.bubbles(Span(0.0, 4.0)) == (0.5, 1 - 0.75 / 4.0)


@pytest.mark.parametrize("hop", [0.1, 0.3])
def test_hops_hide_behind_compute_if_enough_microbatches_are_in_flight(hop):
    """mLoRA's figure 5: sending, receiving and computing overlap, and only the longest of them counts."""
    plan, stages = work(4, 20, 2), 4
    price = PassPrice(1.0, 1.0, activation_bytes=1, gradient_bytes=1)
    prices = Prices(((price,) * stages,) * len(plan.microbatches))
    cluster = PricedCluster(stages, Link(1 / hop))

    def bubbles(spare):
        timeline = simulate(multi_job(plan, stages, prices, spare), prices, cluster)
        return timeline.bubbles(timeline.span_between_steps(stages - 1, "job0", 6, 16))

    assert bubbles(stages - 1) == pytest.approx([0.0] * stages, abs=1e-9)
    assert min(bubbles(0)) > hop / 2


def test_two_senders_take_turns_at_one_receive_lane():
    """The middle device is sent an activation and a gradient at the same moment; each takes two seconds."""
    plan = work(1, 1, 2)
    made = one_forward_one_backward(plan, 3)
    one = PassPrice(1.0, 1.0, activation_bytes=2, gradient_bytes=2)
    timeline = simulate(made, Prices(((one,) * 3,) * 2), PricedCluster(3, Link(1.0)))
    for device in range(3):
        for lane in Lane:
            events = sorted(timeline.events_of(device, lane), key=lambda event: (event.start, event.stop))
            ends = [event.stop for event in events]
            assert all(end <= event.start for end, event in zip(ends, events[1:], strict=False))


def streamed(*actions):
    plan = work(1, 1, 1)
    return Program(plan.capacity, plan.microbatches, plan.batches, (actions,), (0, 0))


PASSES = (Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0), Step("job0", 1))


def test_a_load_overlaps_the_compute_before_it_and_a_pass_waits_for_it():
    first, second, last, back, step = PASSES
    program = streamed(first, Load(1), second, last, Evict(1), back, step)
    prices = Prices(((PassPrice(1.0, 1.0), PassPrice(1.0, 1.0)),), weight_bytes=(5, 30))
    timeline = simulate(program, prices, PricedCluster(1, host_link=Link(10.0, latency=0.5)))
    assert start_and_stop(timeline, Load(1)) == [(0.0, 3.5)]
    assert start_and_stop(timeline, second) == [(3.5, 4.5)]
    assert timeline.makespan == 6.5
    assert timeline.memory[0] == (Level(0.0, 5), Level(0.0, 35), Level(5.5, 5))
    assert timeline.peaks == (35,)


def test_a_stage_given_up_and_brought_back_is_waited_for_only_the_second_time():
    first, second, last, back, step = PASSES
    program = streamed(first, Evict(0), Load(0), second, last, back, step)
    prices = Prices(((PassPrice(1.0, 1.0),) * 2,), weight_bytes=(40, 0))
    timeline = simulate(program, prices, PricedCluster(1, host_link=Link(10.0)))
    assert start_and_stop(timeline, first) == [(0.0, 1.0)]
    assert start_and_stop(timeline, Load(0)) == [(1.0, 5.0)]
    assert start_and_stop(timeline, back) == [(5.0, 6.0)]


def test_loads_under_one_root_complex_share_its_bandwidth_and_others_do_not():
    plan = work(1, 1, 1)
    device = one_forward_one_backward(plan, 2)
    loaded = replace(device, devices=tuple((Load(at), *one) for at, one in enumerate(device.devices)))
    prices = Prices(((PassPrice(0.0, 0.0),) * 2,), weight_bytes=(10, 30))

    def ends(*roots, queued=False):
        cluster = PricedCluster(
            len(roots),
            host_link=Link(10.0),
            device_roots=tuple(roots),
            root_bandwidths=(10.0, 10.0),
            serializes_loads=queued,
        )
        timeline = simulate(loaded, prices, cluster)
        return [event.stop for at in (0, 1) for event in timeline.events_of(at, Lane.load)]

    assert ends(0, 1) == [1.0, 3.0]
    # Half the bandwidth each for two seconds; then the longer one has it all for its last twenty bytes.
    assert ends(0, 0) == [2.0, 4.0]
    # In a queue the one that came first is as fast as alone, and the other no slower than in shares.
    assert ends(0, 0, queued=True) == [1.0, 4.0]


def test_what_a_backward_makes_again_is_there_only_while_it_runs():
    price = PassPrice(1.0, 1.0, kept_bytes=10, working_bytes=7)
    plan = work(1, 1, 2)
    timeline = simulate(
        one_forward_one_backward(plan, 1), Prices(((price,),) * 2), PricedCluster(1, Link(1.0))
    )
    assert timeline.peaks == (17,)
    assert timeline.memory[0][-1].bytes == 0


def test_memory_holds_what_is_kept_what_has_arrived_and_what_is_to_be_sent():
    price = PassPrice(1.0, 1.0, activation_bytes=3, gradient_bytes=2, kept_bytes=10)
    timeline = simulate(
        one_forward_one_backward(work(1, 1, 1), 2),
        Prices(((price, price),), weight_bytes=(100, 200)),
        PricedCluster(2, Link(1.0)),
    )
    assert timeline.memory[0] == (
        Level(0.0, 100),
        Level(0.0, 103),
        Level(0.0, 113),
        Level(4.0, 110),
        Level(6.0, 112),
        Level(9.0, 102),
        Level(9.0, 100),
    )
    assert timeline.peaks == (113, 212)


def test_the_steady_region_leaves_out_the_filling_and_the_draining():
    prices = even_prices(40, 4)
    timeline = simulate(multi_job(work(4, 10, 1), 4, prices), prices, PricedCluster(4))
    assert timeline.steady_span().start == 3.0
    assert timeline.bubbles(timeline.steady_span())[3] == 0.0
    assert min(timeline.bubbles()) > 0.0


@pytest.mark.slow
def test_eight_devices_and_two_thousand_microbatches_take_seconds():
    prices = even_prices(2000, 8)
    program = one_forward_one_backward(work(8, 25, 10), 8)
    began = process_time()
    timeline = simulate(program, prices, PricedCluster(8))
    assert is_within(process_time() - began, 10)
    assert timeline.makespan == pytest.approx(2 * 2000 + 2 * 7)


def test_a_step_waits_for_the_word_of_every_device_and_a_word_takes_the_links_latency():
    """Two stages, one microbatch of 1 s each way: the reduction goes up one link, the word back down it."""
    plan = work(jobs=1, steps=1, microbatches=1)
    cluster = PricedCluster(2, Link(latency=0.25))
    timeline = simulate(one_forward_one_backward(plan, 2), even_prices(1, 2), cluster)
    at = {(one.device, type(one.action)): one.stop for one in timeline.events_of(0)}
    at |= {(one.device, type(one.action)): one.stop for one in timeline.events_of(1)}
    assert at[1, Reduce] == at[1, Backward] == 3.25
    assert at[0, Reduce] == at[0, Step] == at[0, Backward] == 4.5
    assert at[1, Step] == 4.75


def overlapping(sum_seconds, layers=1):
    """Two microbatches of two jobs, and the prices of their passes: in a forward, an attention takes 1
    second, a feed-forward 3 and the rest 0.5; in a backward, 2, 6 and 0."""
    program = one_forward_one_backward(work(jobs=2, steps=1, microbatches=1), 1)
    forward, backward = HalfPrice(1.0, 3.0, sum_seconds), HalfPrice(2.0, 6.0, sum_seconds)
    sums = 2 * layers * sum_seconds
    price = PassPrice(
        4.0 * layers + sums + 0.5,
        8.0 * layers + sums,
        kept_bytes=7,
        forward_sum_seconds=sums,
        backward_sum_seconds=sums,
        forward_half=forward,
        backward_half=backward,
    )
    return overlap_microbatches(program, layers), program, Prices(((price,),) * 2)


def test_the_sum_of_one_microbatch_overlaps_with_the_half_layer_of_the_other():
    program, plain, prices = overlapping(1.0)
    timeline = simulate(program, prices, PricedCluster(1))
    spans = {(one.lane, one.action): (one.start, one.stop) for one in timeline.events}
    compute, link = Lane.compute, Lane.sum
    assert spans[compute, ForwardHalf(1, 0, 0)] == spans[link, ForwardHalf(0, 0, 0)] == (1.0, 2.0)
    assert spans[compute, ForwardHalf(0, 0, 1)] == (2.0, 5.0)
    assert spans[link, ForwardHalf(1, 0, 0)] == (2.0, 3.0)
    assert spans[compute, ForwardHalf(1, 0, 1)] == (5.0, 8.0)
    # The second loss waits for the last sum, while the first one is computed.
    assert spans[compute, Forward(0)] == (8.0, 8.5)
    assert spans[compute, Forward(1)] == (9.0, 9.5)
    assert spans[compute, BackwardHalf(0, 0, 1)] == (9.5, 15.5)
    assert spans[compute, BackwardHalf(1, 0, 0)] == (23.5, 25.5)
    assert timeline.makespan == 26.5
    assert timeline.busy_fractions() == (25.0 / 26.5,)
    assert simulate(plain, prices, PricedCluster(1)).makespan == 2 * (6.5 + 10.0)


def test_sums_that_take_longer_than_half_layers_follow_one_another():
    program, _, prices = overlapping(4.0)
    timeline = simulate(program, prices, PricedCluster(1))
    sums = sorted((one.start, one.stop) for one in timeline.events_of(0, Lane.sum))
    assert sums[:4] == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0), (13.0, 17.0)]
    assert start_and_stop(timeline, Forward(1)) == [(17.0, 17.5)]


def test_two_microbatches_that_overlap_keep_their_activations_at_the_same_time():
    program, plain, prices = overlapping(1.0)
    assert simulate(program, prices, PricedCluster(1)).peaks == (14,)
    assert simulate(plain, prices, PricedCluster(1)).peaks == (7,)


@pytest.mark.parametrize(("share", "bound"), [(0.3, 1.08), (0.6, 1.2), (1.0, 1.4)])
def test_with_the_proportions_of_llama_3_a_round_is_little_longer_than_compute(share, bound):
    """An attention has about a quarter of the computation of its feed-forward."""
    program, plain, _ = overlapping(0.0, layers=16)
    forward = HalfPrice(0.2, 0.8, share / 2)
    sums = 32 * share / 2
    price = PassPrice(
        16.0 + sums, 16.0 + sums, forward_sum_seconds=sums, backward_sum_seconds=sums,
        forward_half=forward, backward_half=forward,
    )  # fmt: skip
    prices = Prices(((price,),) * 2)
    seconds, alone = (simulate(one, prices, PricedCluster(1)).makespan for one in (program, plain))
    assert seconds / 64 <= bound
    assert alone / 64 == pytest.approx(1.0 + share)


def test_half_layers_without_prices_are_counted_with_their_passes():
    program, plain, _ = overlapping(1.0)
    prices = even_prices(2, 1, 2.0, 3.0)
    assert simulate(program, prices, PricedCluster(1)).makespan == 10.0
    assert simulate(plain, prices, PricedCluster(1)).makespan == 10.0
