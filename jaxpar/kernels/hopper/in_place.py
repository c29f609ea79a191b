"""A kernel for Mosaic GPU that overwrites its first operand.

JAX's public entry, `plgpu.kernel`, overwrites references alone, and JAX 0.11.2 refuses references
to arrays that vary over the axes of a `jax.shard_map`: "mpmd_map does not support Refs with varying
manual axis types".
"""

from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxpar.jax_private.table import CONFIG, MPMD


def overwriting(
    body: Callable[..., None],
    x: jax.Array,
    out_type: Sequence[jax.ShapeDtypeStruct],
    mesh: plgpu.Mesh,
    name: str,
    compiler_params: plgpu.CompilerParams,
) -> tuple[jax.Array, ...]:
    """Run a kernel whose first result takes the place of x.

    Args:     body: called with references to x, to the result in its place, and to `out_type`.
    Returns:  the result in x's place, and those of `out_type`.
    """
    varying = jax.typeof(x).manual_axis_type
    types = jax.ShapeDtypeStruct(x.shape, x.dtype), *out_type
    out_types = [jax.ShapeDtypeStruct(a.shape, a.dtype, manual_axis_type=varying) for a in types]
    made = MPMD.load()._mpmd_map(
        [(mesh, body)],
        out_types,
        input_output_aliases={0: 0},
        compiler_params=compiler_params,
        interpret=CONFIG.load().pallas_tpu_interpret_mode_context_manager.value or False,
        name=name,
    )(x)
    return tuple(made)
