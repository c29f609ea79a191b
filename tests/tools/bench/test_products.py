"""Matrix products of a program, as they are run alone: the same numbers in the same memory."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.monitoring import hlo
from scripts.measure import matmul_products as products
from scripts.measure import matmul_sustained as sustained
from scripts.measure.matmul_products import Product, product_of


def module_of(*lines: str, others: str = "") -> hlo.Module:
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"HloModule jit_f\n\n{others}\nENTRY %main {{\n{body}\n}}\n")


def the_product(*lines: str, others: str = "") -> Product | None:
    """Of the last line."""
    module = module_of(*lines, others=others)
    return product_of(module, module.computations["main"][-1])


def dot_over(left: str, right: str) -> str:
    return f"lhs_contracting_dims={{{left}}}, rhs_contracting_dims={{{right}}}"


X, W = "%x = bf16[6,4]{1,0} parameter(0)", "%w = bf16[4,10]{1,0} parameter(1)"
PLAIN = Product((6, 4), (4, 10), (1,), (0,), "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("x", "w", "result", "over", "expected"),
    [
        ("bf16[6,4]{1,0}", "bf16[4,10]{1,0}", "bf16[6,10]{1,0}", "1 0", PLAIN),
        ("bf16[6,4]", "bf16[4,10]", "bf16[6,10]", "1 0", PLAIN),
        (  # what lies the other way round is a matrix with its dims swapped
            *("bf16[6,4]{0,1}", "bf16[4,10]{0,1}", "f32[6,10]{1,0}", "1 0"),
            Product((4, 6), (10, 4), (0,), (1,), "bfloat16", "float32"),
        ),
        (  # and a result that does is the product of the two in the other order
            *("bf16[6,4]{1,0}", "bf16[4,10]{1,0}", "bf16[6,10]{0,1}", "1 0"),
            Product((4, 10), (6, 4), (0,), (1,), "bfloat16", "bfloat16"),
        ),
        (  # pairs of dims stay pairs
            *("f32[2,3,6]{0,2,1}", "f32[3,10,2]{2,1,0}", "f32[6,10]{1,0}", "0,1 2,0"),
            Product((3, 6, 2), (3, 10, 2), (2, 0), (2, 0), "float32", "float32"),
        ),
        (  # a dim of 1 lies anywhere
            *("f32[1,6,4]{2,0,1}", "f32[4,10]{1,0}", "f32[1,6,10]{2,0,1}", "2 0"),
            Product((6, 1, 4), (4, 10), (2,), (0,), "float32", "float32"),
        ),
        ("f32[2,6,4]{2,0,1}", "f32[4,10]{1,0}", "f32[2,6,10]{2,1,0}", "2 0", None),
        ("f32[2,6,4]{2,1,0}", "f32[4,10]{1,0}", "f32[2,6,10]{1,2,0}", "2 0", None),
        ("f8e4m3fn[6,4]{1,0}", "f8e4m3fn[4,10]{1,0}", "bf16[6,10]{1,0}", "1 0", None),
        ("s8[6,4]{1,0}", "s8[4,10]{1,0}", "s32[6,10]{1,0}", "1 0", None),
        ("bf16[6,4]{1,0}", "f32[4,10]{1,0}", "f32[6,10]{1,0}", "1 0", None),
    ],
)
def test_a_dot(x, w, result, over, expected):
    dot = f"%d = {result} dot(%x, %w), {dot_over(*over.split())}"
    assert the_product(f"%x = {x} parameter(0)", f"%w = {w} parameter(1)", dot) == expected


def test_products_in_batches_are_not_known():
    batches = "lhs_batch_dims={0}, rhs_batch_dims={0}, " + dot_over("2", "1")
    lines = ["%x = f32[3,6,4]{2,1,0} parameter(0)", "%w = f32[3,4,10]{2,1,0} parameter(1)"]
    assert the_product(*lines, f"%d = f32[3,6,10]{{2,1,0}} dot(%x, %w), {batches}") is None


def gemm(result: str, operands: str, batch: str = "", target: str = "__cublas$lt$matmul") -> str:
    """A library call, as XLA writes it: with a workspace beside the result."""
    dims = f'"lhs_batch_dimensions":[{batch}],"lhs_contracting_dimensions":["1"]'
    dims += f',"rhs_batch_dimensions":[{batch}],"rhs_contracting_dimensions":["0"]'
    config = f'{{"gemm_backend_config":{{"alpha_real":1,"dot_dimension_numbers":{{{dims}}},'
    config += '"epilogue":"DEFAULT"}}'
    return (
        f"%c = ({result}, s8[33554432]{{0}}) custom-call({operands}), "
        f'custom_call_target="{target}", backend_config={config}'
    )


def test_a_library_call():
    plain = "bf16[6,10]{1,0}"
    assert the_product(X, W, gemm(plain, "%x, %w")) == PLAIN
    assert the_product(X, W, gemm(plain, "%x, %w", target="__cublas$gemm")) == PLAIN
    assert the_product(X, W, gemm(plain, "%x, %w", batch='"0"')) is None
    assert the_product(X, W, gemm(plain, "%x, %w", target="__cublas$lt$matmul$f8")) is None
    assert the_product(X, W, gemm(plain, "%x, %w", target="mosaic_gpu")) is None
    turned = the_product(X, W, gemm("bf16[6,10]{0,1}", "%x, %w"))
    assert (turned.left, turned.right) == ((4, 10), (6, 4))


X8, W8 = "%x = f8e4m3fn[6,4]{1,0} parameter(0)", "%w = f8e5m2[4,10]{0,1} parameter(1)"
SCALES = ("%s = f32[] parameter(2)", "%r = f32[] parameter(3)")
EIGHT = dict(target="__cublas$lt$matmul$f8")


def test_a_library_call_on_8_bits():
    """Its scales come behind what it multiplies, and behind what it adds to."""
    call = gemm("bf16[6,10]{1,0}", "%x, %w, %s, %r", **EIGHT)
    exact = Product(
        *((6, 4), (10, 4), (1,), (1,), "float8_e4m3fn", "bfloat16"), right_dtype="float8_e5m2"
    )
    assert the_product(X8, W8, *SCALES, call) == exact
    assert str(exact) == "float8_e4m3fn[6,4] x float8_e5m2[10,4] over 1 and 1 in bfloat16"
    precision = '"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]},"epilogue"'
    fast = the_product(X8, W8, *SCALES, call.replace('"epilogue"', precision))
    assert fast == dataclasses.replace(exact, fast=True) and str(fast).endswith(", fast")
    base = "%b = bf16[6,10]{1,0} parameter(4)"
    added = gemm("bf16[6,10]{1,0}", "%x, %w, %b, %s, %r", **EIGHT)
    assert the_product(X8, W8, *SCALES, base, added) == dataclasses.replace(exact, adds=True)
    alike = W8.replace("e5m2", "e4m3fn")
    assert the_product(X8, alike, *SCALES, call) == dataclasses.replace(exact, right_dtype="")
    assert the_product(X, W8, *SCALES, call) is None  # of 16 and 8 bits
    assert the_product(X8, W8, *SCALES, call.replace("bf16[6,10]", "f8e4m3fn[6,10]")) is None


def test_a_library_call_on_elements_of_tuples():
    both = "%t = (f32[], /*index=1*/bf16[6,4]{1,0}, bf16[4,10]{1,0}) parameter(0)"
    assert the_product(both, gemm("bf16[6,10]{1,0}", "%t#1, %t#2")) == PLAIN
    assert the_product(both, gemm("bf16[6,10]{1,0}", "%t#1, %elsewhere")) is None


def test_a_third_operand_is_added_to():
    base = "%b = bf16[6,10]{1,0} parameter(2)"
    found = the_product(X, W, base, gemm("bf16[6,10]{1,0}", "%x, %w, %b"))
    assert found == Product((6, 4), (4, 10), (1,), (0,), "bfloat16", "bfloat16", adds=True)
    assert str(found) == "bfloat16[6,4] x [4,10] over 1 and 0, added"
    bias = "%b = bf16[10]{0} parameter(2)"
    assert the_product(X, W, bias, gemm("bf16[6,10]{1,0}", "%x, %w, %b")) is None


INSIDE = """\
%fused (p: bf16[6,4], q: bf16[4,10]) -> bf16[6,10] {
  %p = bf16[6,4]{1,0} parameter(0)
  %q = bf16[4,10]{1,0} parameter(1)
  %dot.1 = f32[6,10]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %c.1 = bf16[6,10]{1,0} convert(%dot.1)
}
"""
FUSION = "%f = bf16[6,10]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused"


def test_a_fusion_is_the_one_product_in_it():
    found = the_product(X, W, FUSION, others=INSIDE)
    assert found == Product((6, 4), (4, 10), (1,), (0,), "bfloat16", "float32")
    assert str(found) == "bfloat16[6,4] x [4,10] over 1 and 0 in float32"
    line = next(line for line in INSIDE.splitlines() if "dot(" in line)
    two = INSIDE.replace(line, f"{line}\n{line.replace('dot.1', 'dot.2')}")
    assert the_product(X, W, FUSION, others=two) is None
    none = INSIDE.replace(line, "  %dot.1 = f32[6,10]{1,0} parameter(2)")
    assert the_product(X, W, FUSION, others=none) is None


def test_products_of_a_line_by_where_it_comes_from_and_its_result():
    at = lambda scope: f'metadata={{op_name="{scope}" stack_frame_id=3}}'  # noqa: E731
    dot = lambda name, result, scope: (  # noqa: E731
        f"%{name} = {result}{{1,0}} dot(%x, %w), {dot_over('1', '0')}, {at(scope)}"
    )
    module = module_of(
        *(X, W, "%v = bf16[4,12]{1,0} parameter(2)"),
        *(dot("one", "bf16[6,10]", "jit(f)/qkv"), dot("two", "bf16[6,10]", "jit(f)/qkv")),
        dot("wide", "bf16[6,12]", "jit(f)/qkv").replace("%w", "%v"),
        *(dot("exact", "f32[6,10]", "jit(f)/qkv"), dot("out", "bf16[6,10]", "jit(f)/out")),
        f"%copy = bf16[6,10]{{1,0}} copy(%one), {at('jit(f)/qkv')}",
    )
    line = "%gemm_fusion_dot.32 = bf16[6,10]{1,0} fusion(%a.1, %b.2), kind=kCustom, "
    assert products.find(module, line + at("jit(f)/qkv")) == [PLAIN, PLAIN]
    assert products.find(module, line + at("jit(f)/out")) == [PLAIN]
    assert products.find(module, line + at("jit(f)/in")) == []
    assert products.find(module, line) == []
    tuple_line = line.replace("bf16[6,10]{1,0}", "(bf16[6,12]{1,0}, s8[64]{0})")
    (wide,) = products.find(module, tuple_line + at("jit(f)/qkv"))
    assert wide.right == (4, 12)


# ------------------------------------------------------------------------- as they are run alone


def run(product: Product, *arrays: np.ndarray) -> np.ndarray:
    """The product as the other process runs it."""
    given = json.loads(json.dumps(product.as_json()))
    return np.asarray(sustained.program_of("m_1", given)(*map(jnp.asarray, arrays)))


def layout(order: list[int]) -> str:
    """HLO's, of dims from the slowest to the contiguous one."""
    return ",".join(map(str, reversed(order)))


@st.composite
def sides(draw):
    """Dims of two operands, those summed over in each, and orders in memory of all three."""
    sums, lefts, rights = (
        draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=2, unique=True))
        for sizes in ([2, 3], [1, 4, 5], [1, 6, 7])
    )
    left = draw(st.permutations([("k", n) for n in sums] + [("m", n) for n in lefts]))
    right = draw(st.permutations([("k", n) for n in sums] + [("n", n) for n in rights]))
    overs = [[side.index(("k", n)) for n in sums] for side in (left, right)]
    counts = (len(left), len(right), len(lefts) + len(rights))
    orders = [draw(st.permutations(range(count))) for count in counts]
    return [[n for _, n in side] for side in (left, right)], overs, orders


@given(drawn=sides(), adds=st.booleans())
def test_alone_it_makes_what_the_line_means(drawn, adds):
    """Bytes of the operands in, bytes of the result out, whatever the layouts; or not known."""
    dims, overs, orders = drawn
    random = np.random.default_rng(0)  # small whole numbers, of which float32 is exact
    values = [random.integers(-999, 1000, size).astype(np.float32) for size in dims]
    meant = np.tensordot(*values, axes=overs)
    types = [
        f"f32[{','.join(map(str, size))}]{{{layout(order)}}}"
        for size, order in zip([*dims, meant.shape], orders, strict=True)
    ]
    lines = [f"%x = {types[0]} parameter(0)", f"%w = {types[1]} parameter(1)"]
    over = dot_over(*(",".join(map(str, each)) for each in overs))
    product = the_product(*lines, f"%d = {types[2]} dot(%x, %w), {over}")
    expected = meant.transpose(orders[2]).reshape(-1)
    stored = [v.transpose(order) for v, order in zip(values, orders[:2], strict=True)]
    if product is None:  # dims of the sides are mixed, or those of one are in another order
        places = [[o.index(dim) for dim in over] for o, over in zip(orders, overs, strict=False)]
        for made in (
            np.tensordot(*stored, axes=places),
            np.tensordot(*stored[::-1], axes=places[::-1]),
        ):
            assert not np.array_equal(made.reshape(-1), expected)
        return
    if product.left != stored[0].shape or product.right != stored[1].shape:
        stored.reverse()
    assert (product.left, product.right) == (stored[0].shape, stored[1].shape)
    if adds:
        base = random.integers(-4, 5, meant.size).astype(np.float32)
        expected = expected + base
        made = jax.eval_shape(sustained.program_of("m", product.as_json()), *stored)
        product = Product(**product.as_json() | {"adds": True})
        stored.append(base.reshape(made.shape))
    np.testing.assert_array_equal(run(product, *stored).reshape(-1), expected)


@pytest.mark.parametrize(
    ("left", "right", "over"),
    [
        *[((8, 4), (4, 6), "1 0"), ((4, 8), (4, 6), "0 0"), ((8, 4), (6, 4), "1 1")],
        ((4, 8), (6, 4), "0 1"),
    ],
)
def test_a_product_of_a_compiled_program(left, right, over):
    axes = [int(n) for n in over.split()]
    values = [
        np.random.default_rng(n).normal(size=dims).astype(np.float32)
        for n, dims in enumerate((left, right))
    ]
    multiply = jax.jit(lambda x, w: jax.lax.dot_general(x, w, ((axes[:1], axes[1:]), ((), ()))))
    compiled = multiply.lower(*values).compile()
    module = hlo.parse(compiled.as_text())
    each = [p for i in module.run_order() if (p := product_of(module, i)) is not None]
    assert len(each) == 1 and each[0].left == left and each[0].dtype == "float32"
    np.testing.assert_allclose(run(each[0], *values), compiled(*values), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_8_bits_are_multiplied_and_scaled_back(fast, adds):
    """With the precision by which XLA tells how its sums are made."""
    random = np.random.default_rng(0)
    x, w = (random.integers(-4, 5, dims).astype(np.float32) for dims in ((6, 4), (10, 4)))
    product = Product(
        *((6, 4), (10, 4), (1,), (1,), "float8_e4m3fn", "bfloat16", adds, "float8_e5m2", fast)
    )
    given = [jnp.asarray(x, jnp.float8_e4m3fn), jnp.asarray(w, jnp.float8_e5m2), np.float32(4)]
    base = [random.integers(-4, 5, (6, 10)).astype(jnp.bfloat16)] * adds
    expected = (x @ w.T) / 4 + (base[0].astype(np.float32) if adds else 0)
    np.testing.assert_array_equal(run(product, *given, *base).astype(np.float32), expected)
    lowered = sustained.program_of("m_1", product.as_json()).lower(*given, *base).as_text()
    assert ("precision = [DEFAULT, DEFAULT]" in lowered) == fast
    assert ("precision = [HIGHEST, HIGHEST]" in lowered) == (not fast)


def test_the_result_has_its_dtype_and_the_program_its_name():
    given = Product((8, 4), (4, 6), (1,), (0,), "bfloat16", "float32").as_json()
    program = sustained.program_of("m_abc", given)
    lowered = program.lower(jnp.ones((8, 4), jnp.bfloat16), jnp.ones((4, 6), jnp.bfloat16))
    assert "jit_m_abc" in lowered.as_text()
    assert jax.tree.leaves(lowered.out_info)[0].dtype == jnp.float32


@pytest.fixture
def three(tmp_path, monkeypatch):
    """A file of three products, two of them added, and how often each was launched and when."""
    monkeypatch.setattr(sustained, "WARM_UP", 2e-3)
    monkeypatch.setattr(sustained, "TIMED", 4e-3)
    plain = Product((8, 4), (4, 6), (1,), (0,), "float32", "float32")
    added = Product((8, 4), (8, 6), (0,), (0,), "bfloat16", "float32", adds=True)
    eight = Product((8, 4), (6, 4), (1,), (1,), "float8_e4m3fn", "bfloat16", True, "float8_e5m2")
    asked, launched = tmp_path / "products.json", []
    named = {"m_1": plain, "m_2": added, "m_3": eight}
    asked.write_text(json.dumps({name: product.as_json() for name, product in named.items()}))
    made = sustained.program_of

    def program_of(name, product):
        program = made(name, product)

        def counted(*arrays):
            if not any(isinstance(a, jax.core.Tracer) for a in arrays):
                launched.append((name, [a.shape for a in arrays]))
            return program(*arrays)

        return counted

    monkeypatch.setattr(sustained, "program_of", program_of)
    return asked, launched


def test_without_a_file_for_times_each_runs_once(three, tmp_path):
    asked, launched = three
    assert sustained.main([str(asked)]) == 0
    assert launched == [
        ("m_1", [(8, 4), (4, 6)]),
        ("m_2", [(8, 4), (8, 6), (4, 6)]),
        ("m_3", [(8, 4), (6, 4), (), (8, 6)]),
    ]
    assert list(tmp_path.iterdir()) == [asked]


def test_times_of_every_round(three, tmp_path):
    asked, launched = three
    times = tmp_path / "times.json"
    assert sustained.main([str(asked), str(times)]) == 0
    found = json.loads(times.read_text())
    assert found.keys() == {"m_1", "m_2", "m_3"}
    for each in found.values():
        assert len(each) == sustained.ROUNDS and all(0 < us < 1e6 for us in each)
    names = [name for name, _ in launched]
    turns = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert turns == ["m_1", "m_2", "m_3"] * sustained.ROUNDS  # so that a drift is in both
    least = 1 + 3 + 2 + 3
    assert all(names.count(name) >= sustained.ROUNDS * least for name in found)
    assert math.prod(launched[-1][1][3]) == 8 * 6
