"""A step of 1.5B on an H200, in three of its instructions: a reduction, a matmul of the layers, one
of the loss. recorded/ has them as they are in XLA's table and in its log.
"""

from pathlib import Path

from scripts.measure import matmul_autotuned as autotuned
from scripts.measure import matmul_table as matmuls

HERE = Path(__file__).parent / "recorded"
LOG, RESULTS = (
    (HERE / f"autotune_{name}.textproto").read_text("utf-8") for name in ("log", "results")
)
REDUCTION = "4adae050de7a471671d786ef905c3210"
QKV, LOSS = "9fee6e21effc887999a77565125b67ac", "afc3692f9f4ef8317a83d15432b0163a"
TRITON = "a77e7c793abc0d0c923a9afb275058e2fe57a198"

#: What is left of those instructions in the compiled step, of two layers.
STEP = """\
HloModule jit_train_step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  ROOT %b = bf16[] parameter(1)
}

ENTRY %main {
  %x = bf16[32768,2048]{1,0} parameter(0)
  %w = bf16[2048,3072]{1,0} parameter(1)
  %t = (bf16[32768,128256]{1,0}, bf16[2048,128256]{1,0}) parameter(2)
  %dot.1 = bf16[32768,3072]{1,0} dot(%x, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(jvp(attention))/qkv/dot_general"}
  %dot.2 = bf16[32768,3072]{1,0} dot(%x, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/jvp(jvp(attention))/qkv/dot_general"}
  %dot.3 = bf16[32768,2048]{1,0} dot(%t#0, %t#1), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}, metadata={op_name="jit(train_step)/jvp(loss)/dot_general"}
  ROOT %sum.1 = f32[2048,501]{1,0} reduce(%x), to_apply=%add, \
metadata={op_name="jit(train_step)/grad_norm/reduce_sum"}
}
"""


def of_the_log() -> dict[str, autotuned.Tried]:
    return {tried.fingerprint: tried for tried in autotuned.read_log(LOG)}


def found() -> dict[str, matmuls.Matmul]:
    """The step's matmuls, by fingerprint."""
    each = matmuls.joined(autotuned.read_log(LOG), RESULTS, STEP)
    return {m.tried.fingerprint: m for m in each}


def timed() -> dict[str, matmuls.Matmul]:
    """As after the runs alone: of the layers' matmul Triton's kernel is the better one."""
    each = found()
    each[QKV].us = {"cublaslt_fission 6": [1600.0], "triton 256 128 64 4 8 1 true 1": [1100.0]}
    each[LOSS].us = {"cublaslt_fission 4": [25_000.0], "cublaslt_fission 0": [25_500.0]}
    return each
