"""Check that a config computes on every mesh what the reference model does.

    python -m jaxpar.certify llama3_8b --mesh data=2,tensor=2 --mesh pipeline=2,sequence=2

`certification/checks.py` lists the checks. Meshes train in float32 for a few steps on random packed
documents, on simulated CPU devices or on the available accelerators, and are compared with
`model/plain` and optax in float64 on one device. The criteria, where `t` is --tolerance:

    weights at init   identical bits on every mesh
    loss              every step, and an evaluation: relative error at most t
    gradients         every parameter: largest error at most t times its largest gradient, or 4
                      times what rounding the weights does to it, at most 10 t
    metrics           of the first step: relative error at most t
    state after       every array after one step and after the last: mean error at most
                      t * (1 + ln(1/t)) times the mean change

The last criterion is a mean because Adam moves an element by about lr * g / |g|, whatever the size
of its gradient g. Where |g| is at most the gradient error d, the update is arbitrary on any mesh,
so the largest error has no useful bound. For gradients distributed uniformly up to s, the mean of
min(1, d / |g|) is (d / s) * (1 + ln(s / d)), and d / s is at most t. This holds for one step. In
later steps, such updates change all gradients; Adam's eps is increased to keep the effect small
(`small_config.steady`). `certification/traces.py` makes the traces that are compared.

Exit codes: 0 all agree, 1 a mismatch, 2 bad input; with --mup: 0 flat, 1 sizes grow or updates
shrink with the width; with --bisect: 0 the same bits, 1 they part.
"""

from jaxpar import commands
from jaxpar.certification.options import BisectOptions, CertifyOptions, MupOptions
from jaxpar.runtime import exit_codes

OPTIONS = {"": CertifyOptions, "--bisect": BisectOptions, "--mup": MupOptions}


def main(options: CertifyOptions | BisectOptions | MupOptions) -> int:
    """Compare the meshes, two runs, or the widths, and return the exit code."""
    if isinstance(options, BisectOptions):
        from jaxpar.certification.bisect import bisect
        from jaxpar.tools.report import bisection

        output = bisection.output_of(options)
        found = bisect(options)
        bisection.write_page(output, found)
        return exit_codes.EXIT_ERROR if found.step else exit_codes.EXIT_OK
    from jaxpar.certification.command import certify
    from jaxpar.certification.coordinates import check_coordinates

    if isinstance(options, MupOptions):
        return check_coordinates(options, commands.model_from)
    return certify(options, commands.model_from)


if __name__ == "__main__":
    commands.run(__name__)
