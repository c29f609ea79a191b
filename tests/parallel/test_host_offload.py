"""Values in host memory, between a layer's forward and its backward: when they are copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.parallel.host_offload import Space, fetch_from_host, in_host_memory, store_to_host


def traced(fn, *args) -> str:
    return str(jax.make_jaxpr(fn)(*args))


def to_host(x):
    return jax.device_put(x, Space.Host)


@pytest.mark.parametrize("order", [store_to_host, fetch_from_host])
def test_without_a_value_in_host_memory_there_is_no_barrier(order):
    text = traced(lambda a, b: order({"a": a, "n": None}, (b,)), 1.0, 2.0)
    assert "barrier" not in text and "device_put" not in text


def test_storing_comes_before_what_is_given_on():
    """The barrier takes the value in host memory and `x`; the rest of the tree goes round it."""
    text = traced(lambda a, b, x: store_to_host((to_host(a), b), x), 1.0, 2.0, jnp.zeros(3))
    (barrier,) = [line for line in text.splitlines() if "barrier" in line]
    assert barrier.count("f32<host>[]") == 1 and barrier.count("f32[3]") == 1
    assert barrier.count("f32[]") == 0


def test_fetching_comes_after_what_it_waits_for_and_leaves_nothing_behind():
    def fetch(a, b, x):
        saved, x = fetch_from_host({"a": to_host(a), "b": b}, x)
        assert not any(map(in_host_memory, jax.tree.leaves((saved, x))))
        return saved, x

    text = traced(fetch, 1.0, 2.0, jnp.zeros(3))
    lines = [line for line in text.splitlines() if "barrier" in line or "device_put" in line]
    assert ["barrier" in line for line in lines] == [False, True, False]
    saved, x = jax.jit(fetch)(1.0, 2.0, jnp.arange(3.0))
    assert (saved["a"], saved["b"]) == (1.0, 2.0)
    np.testing.assert_array_equal(x, [0, 1, 2])
