"""Random steps for hypothesis: kernels, copies, and waits of every kind."""

from hypothesis import strategies as st
from tests.timelines import Copy, Kernel, Wait, read, record, update, wait

from tightfit.tape import CopyDirection, WaitKind

small = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
streams = st.integers(0, 2)
kernels = st.builds(Kernel, seconds=small, stream=streams, issue=st.sampled_from([0.0, 0.5, 1.0]))
copies = st.builds(
    Copy,
    seconds=st.sampled_from([0.25, 1.0, 3.0]),
    stream=streams,
    issue=st.sampled_from([0.0, 0.5]),
    direction=st.sampled_from(CopyDirection),
    is_blocking=st.booleans(),
)
numbers = st.integers(0, 3)
waits = st.one_of(
    st.builds(record, streams, numbers),
    st.builds(wait, streams, numbers),
    st.builds(read, streams),
    st.builds(Wait, kind=st.just(WaitKind.HOST_FOR_EVENT), event=numbers),
    st.builds(Wait, kind=st.just(WaitKind.HOST_FOR_STREAM), stream=streams),
    st.just(Wait(kind=WaitKind.HOST_FOR_DEVICE)),
    st.builds(update, st.integers(0, 3)),
)
steps = st.lists(st.one_of(kernels, kernels, copies, waits), min_size=1, max_size=14).filter(
    lambda rows: not all(isinstance(row, Wait) for row in rows)
)
