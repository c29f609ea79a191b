"""Choosing matmul kernels: XLA's table and log, what is taken from them, and what is written."""

import dataclasses

import pytest

from jaxpar.monitoring import hlo
from scripts.measure import matmul_autotuned as autotuned
from scripts.measure import matmul_table as matmuls
from tests.tools.bench.tuned import (
    LOG,
    LOSS,
    QKV,
    REDUCTION,
    RESULTS,
    STEP,
    TRITON,
    found,
    of_the_log,
    timed,
)

# ------------------------------------------------------------------------ XLA's table and its log


def test_a_log_is_read_fastest_first():
    log = of_the_log()
    assert list(log) == [REDUCTION, QKV, LOSS]
    told = {f: [(str(c), c.us) for c in tried.candidates] for f, tried in log.items()}
    assert told == {
        REDUCTION: [("native_emitter 0", 134.624)],
        QKV: [("cublaslt_fission 6", 537.088), ("triton 256 128 64 4 8 1 true 1", 548.288)],
        LOSS: [  # the one that did not compile is none of them
            ("cublaslt_fission 4", 22296.512),
            ("cublaslt_fission 0", 22324.545),
            ("triton 16 8 16 1 2 1 1", pytest.approx(1_124_282.348)),
        ],
    }
    assert [c.backend for c in log[QKV].candidates] == ["CUBLASLT_FISSION", "TRITON"]
    assert log[QKV].line.startswith("%gemm_fusion_dot.32 = bf16[32768,3072]{1,0} fusion(")
    assert 'op_name="jit(train_step)/jvp(jvp(attention))/qkv/dot_general"' in log[QKV].line


def test_an_instruction_that_was_tuned_again_is_there_once():
    again = autotuned.read_log(LOG + LOG.replace("nanos: 537088", "nanos: 600000"))
    assert [t.fingerprint for t in again] == [REDUCTION, QKV, LOSS]
    assert [c.us for c in again[1].candidates] == [548.288, 600.0]


def test_versions_by_backend():
    backends = {"CUBLASLT_FISSION": "13.0.0", "NATIVE_EMITTER": "v1", "TRITON": TRITON}
    assert autotuned.versions(LOG) == backends


def test_entries_and_their_comments_go_around_unchanged():
    text = RESULTS.replace("entries {", "# one\n# two\nentries {", 1)
    entries = autotuned.entries(f"# of the file\n\n{text}")
    assert list(entries) == [QKV, LOSS]
    assert entries[QKV].startswith("# one\n# two\nentries {\n")
    assert autotuned.text_of(entries.values()) == text
    assert autotuned.entries("# of the file\n") == {}


def test_a_choice_is_read_and_put_in_anothers_place():
    entry = autotuned.entries(RESULTS)[QKV]
    assert str(autotuned.choice_of(entry)) == "cublaslt_fission 6"
    other = of_the_log()[QKV].candidates[1]
    made = autotuned.with_choice(entry, other, "v9")
    assert autotuned.choice_of(made).config.split() == other.config.split()
    assert made.count("optimal_backend_version") == 1 and '_version: "v9"' in made
    assert "CUBLASLT" not in made and made.count("{") == made.count("}")
    own = autotuned.choice_of(entry)
    assert autotuned.with_choice(made, own, "13.0.0") == entry  # and all else is as it was
    with pytest.raises(ValueError, match="without a choice: 'entries"):
        autotuned.choice_of("entries {\n}\n")


def test_a_table_with_other_choices():
    takes = {LOSS: of_the_log()[LOSS].candidates[2]}
    made = autotuned.vary_choices(RESULTS, takes, autotuned.versions(LOG))
    before = autotuned.entries(RESULTS)
    assert list(made) == [QKV, LOSS] and made[QKV] == before[QKV]
    assert str(autotuned.choice_of(made[LOSS])) == "triton 16 8 16 1 2 1 1"
    assert f'optimal_backend_version: "{TRITON}"' in made[LOSS]
    assert autotuned.entries(autotuned.text_of(made.values())) == made


# ------------------------------------------------------------------------------- a step's matmuls


def test_the_log_meets_the_program():
    each = found()
    assert list(each) == [LOSS, QKV]  # the longest first
    qkv, loss = each[QKV], each[LOSS]
    assert (qkv.times, loss.times) == (2, 1)
    assert str(qkv.product) == "bfloat16[32768,2048] x [2048,3072] over 1 and 0"
    assert str(loss.product) == "bfloat16[32768,128256] x [2048,128256] over 1 and 1"
    assert (str(qkv.own), qkv.name) == ("cublaslt_fission 6", f"m_{QKV}")


def test_how_often_a_matmul_runs_counts():
    """Of two that are as fast, the one that runs twice comes first."""
    log, same = of_the_log(), of_the_log()[QKV].candidates
    tried = [dataclasses.replace(log[name], candidates=same) for name in (LOSS, QKV)]
    assert [m.times for m in matmuls.joined(tried, RESULTS, STEP)] == [2, 1]


@pytest.mark.parametrize("change", ["one kernel", "short", "not in the table", "not in the step"])
def test_what_is_left_to_xla(change):
    log, results, step = of_the_log(), RESULTS, STEP
    if change == "one kernel":
        log[QKV] = dataclasses.replace(log[QKV], candidates=log[QKV].candidates[:1])
    if change == "short":
        quick = [dataclasses.replace(c, us=c.us / 6) for c in log[QKV].candidates]
        log[QKV] = dataclasses.replace(log[QKV], candidates=tuple(quick))
    if change == "not in the table":
        results = results.replace(QKV, "0" * 32)
    if change == "not in the step":
        step = step.replace("/qkv/", "/values/")
    left = matmuls.joined(tuple(log.values()), results, step)
    assert [m.tried.fingerprint for m in left] == [LOSS]


def test_a_reduction_is_no_matmul():
    log = of_the_log()
    many = dataclasses.replace(log[REDUCTION], candidates=log[QKV].candidates)
    assert matmuls.joined([many], RESULTS.replace(QKV, REDUCTION), STEP) == []
    assert hlo.parse(STEP).instructions["sum.1"].scope in many.line  # though it is there


def test_rivals_are_xlas_choice_and_what_is_nearly_as_fast():
    loss = found()[LOSS]
    assert [str(c) for c in loss.rivals()] == ["cublaslt_fission 4", "cublaslt_fission 0"]
    slow = loss.tried.candidates[2]
    taken = dataclasses.replace(loss, own=dataclasses.replace(slow, us=0.0))
    own = "triton 16 8 16 1 2 1 1"  # whatever its time
    assert [str(c) for c in taken.rivals()] == [own, "cublaslt_fission 4", "cublaslt_fission 0"]


def test_the_best_by_its_mean_at_the_power_limit():
    loss = found()[LOSS]
    loss.us = {"cublaslt_fission 4": [90.0, 130.0], "cublaslt_fission 0": [101.0, 103.0]}
    assert str(loss.best()) == "cublaslt_fission 0"
    assert loss.time_of(loss.best()) == 102.0 and loss.time_of(loss.own) == 110.0
    assert loss.time_of(loss.tried.candidates[2]) is None


def test_a_table_keeps_the_entries_of_other_matmuls():
    other = "0" * 32
    theirs = "# somebody's\n" + autotuned.entries(RESULTS)[LOSS].replace(LOSS, other)
    stale = "# stale\n" + autotuned.entries(RESULTS)[QKV]
    each = timed()
    earlier = matmuls.HEADER + theirs + stale
    text = matmuls.merged(earlier, RESULTS, LOG, list(each.values()))
    assert text.startswith(matmuls.HEADER) and text.count(matmuls.HEADER) == 1
    entries = autotuned.entries(text)
    assert list(entries) == [other, QKV, LOSS]
    assert entries[other] == theirs and "stale" not in text
    assert str(autotuned.choice_of(entries[QKV])) == "triton 256 128 64 4 8 1 true 1"
    assert f'optimal_backend_version: "{TRITON}"' in entries[QKV]
    assert entries[QKV].splitlines()[:3] == [
        "# bfloat16[32768,2048] x [2048,3072] over 1 and 0",
        "# triton 256 128 64 4 8 1 true 1: 1,100 us, XLA's choice cublaslt_fission 6: 1,600",
        "entries {",
    ]
    assert entries[LOSS].endswith(autotuned.entries(RESULTS)[LOSS])  # XLA's choice is the best
    assert matmuls.merged(text, RESULTS, LOG, list(each.values())) == text


def test_what_was_not_run_alone_is_in_no_table():
    each = timed()
    each[LOSS].us = {}
    del each[QKV].us["cublaslt_fission 6"]
    entries = autotuned.entries(matmuls.merged("", RESULTS, LOG, list(each.values())))
    assert list(entries) == [QKV]
    assert "# triton 256 128 64 4 8 1 true 1: 1,100 us\n" in entries[QKV]


def test_in_words():
    each = timed()
    lines = matmuls.in_words(list(each.values())).splitlines()
    assert lines[1].split()[:4] == ["1", "x", "25,000", "25,000"]
    assert lines[2].split()[:4] == ["2", "x", "1,600", "1,100"]
    assert lines[2].endswith(": cublaslt_fission 6, triton 256 128 64 4 8 1 true 1")
    assert lines[3:] == ["total saving per step: 1.0 ms"]  # 2 x 500 us
    each[LOSS].us = {}
    del each[QKV].us["cublaslt_fission 6"]
    lines = matmuls.in_words(list(each.values())).splitlines()
    assert lines[1].endswith("over 1 and 1: cannot be run separately")
    assert "not run     1,100" in lines[2] and lines[3] == "total saving per step: 0.0 ms"
