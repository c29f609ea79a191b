"""Several sources by weight: shares, epochs, order, and the same batches wherever they are made."""

import shlex

import jax
import numpy as np
import pytest

from jaxpar import Loss
from jaxpar.config import Config, ConfigError, MixtureWeights, ParallelConfig, Source, replace
from jaxpar.config.command_line import parse_overrides
from jaxpar.config.serialize import from_json, to_json
from jaxpar.config.validate import check
from jaxpar.data.loader import Loader, source_seeds
from jaxpar.data.mixture import BLOCK, Mixture, StagedMixture, apportion
from jaxpar.data.options import PrepareOptions
from jaxpar.data.prepare.text import prepare
from jaxpar.data.shuffle import sequence_order
from jaxpar.data.sources import fingerprint, tokenizer_folder
from jaxpar.sharding.axes import BATCH_SPEC
from jaxpar.sharding.mesh import make_mesh

BATCH, LENGTH = 8, 16


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    """Three files whose tokens say of which source and sequence they are: (source, sequence)."""
    folder, found = tmp_path_factory.mktemp("mixed"), []
    for source, count in enumerate([200, 50, 1000]):
        tokens = np.full(count * LENGTH + 1, source, "<u2")
        tokens[1:-1:LENGTH] = 10 + np.arange(count)
        tokens.tofile(folder / f"{source}.bin")
        found.append(str(folder / f"{source}.bin"))
    return found


@pytest.fixture
def cfg(paths) -> Config:
    """The three, mixed 5 : 1 : 4."""
    values = {
        "data.mixture": tuple(map(Source, paths, (0.5, 0.1, 0.4))),
        "data.eos_id": 9,
        "data.seq_len": LENGTH,
        "train.global_batch_size": BATCH,
        "model.vocab_size": 1024,
    }
    return replace(Config(), **values)


def mesh_of(number: int, **axes: int):
    return make_mesh(ParallelConfig(**({"data": 1} | axes)), jax.devices()[:number])


def seen(loader: Loader, steps) -> np.ndarray:
    """(source, sequence) of every row of some steps: [rows, 2]."""
    rows = [loader.host_rows(step, np.arange(BATCH)).tokens for step in steps]
    tokens = np.concatenate(rows)
    return np.stack([tokens[:, 0], tokens[:, 1] - 10], axis=1)


def test_shares_and_epochs_are_as_asked(cfg):
    """Over one block exactly by weight; `epochs` counts what really came."""
    loader = Loader(cfg, mesh_of(1))
    steps = 400
    rows = seen(loader, range(steps))
    counts = np.bincount(rows[:, 0], minlength=3)
    np.testing.assert_allclose(counts / counts.sum(), [0.5, 0.1, 0.4], atol=0.02)
    sizes = np.array([200, 50, 1000])
    assert list(loader.epochs(steps).values()) == pytest.approx(counts / sizes)
    whole = Mixture([0.5, 0.1, 0.4], seed=0).taken(3 * BLOCK)
    np.testing.assert_array_equal(whole, 3 * apportion([0.5, 0.1, 0.4], BLOCK))


def test_every_epoch_of_a_source_shows_each_window_once(cfg):
    rows = seen(Loader(cfg, mesh_of(1)), range(400))
    for source, size in enumerate([200, 50, 1000]):
        order = rows[rows[:, 0] == source, 1]
        for start in range(0, len(order) - size + 1, size):
            assert sorted(order[start : start + size]) == list(range(size))
        assert len(set(order[:size])) == min(size, len(order))


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "sequence": 2}, {"replica": 4}])
def test_the_same_batch_on_every_mesh(axes, cfg):
    number = int(np.prod(list(axes.values())))
    batch, alone = (Loader(cfg, mesh).batch(5) for mesh in (mesh_of(number, **axes), mesh_of(1)))
    for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(alone), strict=True):
        assert a.sharding.spec == BATCH_SPEC
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_row_depends_on_nothing_but_seed_and_step(cfg):
    """Any subset of rows, any order of steps, a fresh loader in the middle: as a resumed run."""
    loader = Loader(cfg, mesh_of(1))
    straight = [loader.host_rows(step, np.arange(BATCH)) for step in range(30)]
    resumed = Loader(cfg, mesh_of(1))
    for step in (29, 17, 3):
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [7], [5, 2]):
            part = resumed.host_rows(step, np.array(rows))
            np.testing.assert_array_equal(part.tokens, straight[step].tokens[rows])
            np.testing.assert_array_equal(part.segment_ids, straight[step].segment_ids[rows])
    other = Loader(replace(cfg, **{"train.seed": 1}), mesh_of(1))
    assert (seen(other, [0]) != seen(loader, [0])).any()


def test_far_steps_cost_no_more_and_agree_with_near_ones():
    """Across the edge of a block, and 10^15 sequences away."""
    mixture = Mixture([3, 1], seed=7)
    numbers = np.arange(BLOCK - 50, BLOCK + 50)
    sources, before = mixture.places(numbers)
    counted = mixture.taken(BLOCK - 50)
    for source, rank in zip(sources, before, strict=True):
        assert rank == counted[source]
        counted[source] += 1
    far = Mixture([3, 1], seed=7).places(np.array([10**15]))
    assert mixture.places(np.array([10**15])) == far
    assert abs(int(far[1][0]) - 10**15 * [0.75, 0.25][int(far[0][0])]) < BLOCK


def test_the_order_of_sources_is_random():
    """No runs longer than chance, no period, no preference for a place in the batch."""
    drawn = Mixture([1, 1], seed=0).places(np.arange(BLOCK))[0]
    runs = 1 + np.count_nonzero(np.diff(drawn))
    assert abs(runs - BLOCK / 2) < 5 * np.sqrt(BLOCK) / 2  # the runs test of Wald and Wolfowitz
    signs = drawn - drawn.mean()
    for lag in (1, 2, 3, 7, 8, 64, 1024):
        correlation = np.mean(signs[lag:] * signs[:-lag]) / np.var(drawn)
        assert abs(correlation) < 5 / np.sqrt(BLOCK), lag
    by_place = drawn.reshape(-1, 8).mean(axis=0)
    assert np.abs(by_place - 0.5).max() < 5 * 0.5 / np.sqrt(BLOCK / 8)
    other = Mixture([1, 1], seed=0).places(np.arange(BLOCK, 2 * BLOCK))[0]
    assert abs(np.mean(drawn == other) - 0.5) < 5 * 0.5 / np.sqrt(BLOCK)


def test_the_order_never_changes():
    """The first sequences, written down: another version of NumPy must not reorder old runs."""
    sources, before = Mixture([2, 1, 1], seed=3).places(np.arange(12))
    assert sources.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0]
    assert before.tolist() == [0, 1, 2, 3, 4, 0, 5, 1, 6, 7, 8, 9]


def test_sources_of_one_size_are_shuffled_apart():
    """Displacement and order within a source are those of chance, and sources are independent."""
    count = 20_000
    first, second = (sequence_order(count, seed)(np.arange(count)) for seed in source_seeds(0, 2))
    bound = 5 / np.sqrt(count)
    assert abs(np.corrcoef(first, second)[0, 1]) < bound
    assert np.count_nonzero(first == second) < 10  # 1 by chance
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < bound
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < bound
        moved = np.abs(order - np.arange(count)).mean() / count  # a third, by chance
        assert abs(moved - 1 / 3) < bound
        rising = np.count_nonzero(np.diff(order) > 0)
        assert abs(rising - count / 2) < 5 * np.sqrt(count / 12)


def test_a_source_alone_keeps_the_order_it_always_had():
    assert source_seeds(5, 1) == [5] and source_seeds(None, 2) == [None, None]
    assert len(set(source_seeds(5, 100))) == 100


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ([1, 1], 10, [5, 5]),
        ([1, 1, 1], 10, [4, 3, 3]),
        ([0.7, 0.3], 10, [7, 3]),
        ([1e-9, 1], 10, [1, 9]),
        ([1e-9, 1e-9, 1, 1], 10, [1, 1, 4, 4]),
        ([5], 7, [7]),
    ],
)
def test_apportion(weights, total, counts):
    assert apportion(weights, total).tolist() == counts


def test_identity_of_a_mixture(cfg, paths):
    """Weights, members and their order count; where they lie does not."""
    one, other, more = Source(paths[0], 1), Source(paths[1], 1), Source(paths[1], 2)
    mixtures = [cfg.data.mixture, (one, other), (other, one), (one, more), (one,)]
    of = lambda mixture: fingerprint(replace(cfg, **{"data.mixture": mixture}))  # noqa: E731
    assert len(set(map(of, mixtures))) == 5
    assert of((Source(paths[0], 1.0),)) == of((one,))


def test_held_out_windows_of_a_mixture(paths, dataset):
    """Named apart, or the sources' own held-out splits mixed by the same weights, in text order."""
    values = {"data.mixture": (Source(paths[0], 1),), "data.held_out": paths[1], "data.eos_id": 9}
    base = replace(Config(), **{"data.seq_len": LENGTH, "train.global_batch_size": BATCH} | values)
    rows = seen(Loader(base, mesh_of(1), "val"), range(2))
    assert rows[:, 0].tolist() == [1] * 16 and rows[:, 1].tolist() == list(range(16))
    mixture = (Source(str(dataset), 1), Source(paths[0], 1))
    own = replace(base, **{"data.mixture": mixture, "data.held_out": ""})
    with pytest.raises(ConfigError, match="has no val split") as error:
        Loader(own, mesh_of(1), "val")
    assert error.value.field == "data.mixture"


def test_a_mixture_travels_through_json_and_the_command_line(cfg):
    assert from_json(to_json(cfg)) == cfg
    asked = parse_overrides(Config(), ["--data.mixture", "a:0.7,b:0.3"])
    assert asked.data.mixture == (Source("a", 0.7), Source("b", 0.3))


def test_the_tokenizer_is_the_first_source_s(cfg, paths, dataset):
    mixture = (Source(str(dataset), 1), Source(paths[0], 1))
    first = replace(cfg, **{"data.mixture": mixture})
    assert tokenizer_folder(first) == str(dataset)
    assert tokenizer_folder(replace(Config(), **{"data.path": "none"})) == "none"
    with pytest.raises(ConfigError, match="has tokens without their tokenizer"):
        tokenizer_folder(cfg)


def test_different_tokenizers_do_not_mix(corpus, dataset, tmp_path):
    """Neither in a mixture nor between training and held-out tokens; files do not say."""
    other = str(tmp_path / "other")
    prepare(PrepareOptions(input=(str(corpus),), output=other, tokenizer="bpe:300", holdout=0.3))
    base = {"data.path": str(dataset), "data.seq_len": LENGTH, "train.global_batch_size": BATCH}
    for field, value, split in [
        ("data.mixture", (Source(str(dataset), 1), Source(other, 1)), "train"),
        ("data.held_out", other, "val"),
    ]:
        with pytest.raises(ConfigError, match="was made with a different tokenizer than") as error:
            Loader(replace(Config(), **base | {field: value}), mesh_of(1), split)
        assert error.value.field == field and error.value.value == value


SCHEDULE = {
    "data.mixture_schedule": (
        MixtureWeights(50, (0, 0.5, 0.5)),
        MixtureWeights(120, (0.2, 0.2, 0.6)),
    )
}


def test_a_schedule_changes_the_shares_and_each_source_goes_on(cfg):
    loader = Loader(replace(cfg, **SCHEDULE), mesh_of(1))
    rows = seen(loader, range(400))
    at = np.repeat(np.arange(400), BATCH)
    for first, end, wanted in ((0, 50, [5, 1, 4]), (50, 120, [0, 5, 5]), (120, 400, [2, 2, 6])):
        counts = np.bincount(rows[(at >= first) & (at < end), 0], minlength=3)
        np.testing.assert_allclose(counts / counts.sum(), np.array(wanted) / 10, atol=0.05)
    assert not (rows[(at >= 50) & (at < 120), 0] == 0).any()
    for source, size in enumerate([200, 50, 1000]):
        order = rows[rows[:, 0] == source, 1]
        for start in range(0, len(order) - size + 1, size):
            assert sorted(order[start : start + size]) == list(range(size))
    sizes = np.array([200, 50, 1000])
    for steps in (30, 50, 51, 120, 400):
        taken = np.bincount(rows[at < steps, 0], minlength=3)
        assert list(loader.epochs(steps).values()) == pytest.approx(taken / sizes)


def test_a_schedule_changes_nothing_before_it_and_not_the_held_out_text(cfg):
    one, other = Loader(cfg, mesh_of(1)), Loader(replace(cfg, **SCHEDULE), mesh_of(1))
    np.testing.assert_array_equal(seen(one, range(50)), seen(other, range(50)))
    assert (seen(one, range(50, 60)) != seen(other, range(50, 60))).any()


def test_far_steps_of_a_stage_agree_with_near_ones():
    staged = StagedMixture([0, 100, BLOCK + 300], [[3, 1], [1, 3], [0, 1]], seed=5)
    numbers = np.arange(BLOCK + 400)
    sources, before = staged.places(numbers)
    for source in (0, 1):
        np.testing.assert_array_equal(
            before[sources == source], np.arange((sources == source).sum())
        )
    np.testing.assert_array_equal(staged.taken(len(numbers)), np.bincount(sources, minlength=2))
    again = staged.places(np.array([BLOCK + 350, 99, 100]))
    for found, wanted in zip(again, (sources, before), strict=True):
        np.testing.assert_array_equal(found, wanted[[BLOCK + 350, 99, 100]])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("50", r"must be a list of STEP:\[WEIGHT,...\].*, but '50' has no weights"),
        ("50:[1,x,2]", "but 'x' is not a number"),
        ("0:[1,1,1]", r"mixture_schedule\[0\]\.step = 0: must be at least 1"),
        ("50:[1,1,1],50:[1,2,1]", "has the step 50 twice"),
        (f"{10**30}:[1,1,1]", "at most 2,147,483,647"),
        ("50:[1,1]", "a weight for each of the 3 sources"),
        ("50:1,2", "but '2' has no weights"),
        ("50:[0,0,0]", "must not all be 0"),
        ("50:[1,-1,1]", r"mixture_schedule\[0\]\.weights\[1\] = -1\.0: must not be negative"),
        ("50:[1,inf,1]", "must be finite"),
        ("50:[1,1,0],60:[1,1e-5,1]", r"schedule\[1\]\.weights\[1\] = 1e-05: .* 1/65,536 of the"),
        (",".join(f"{n}:[1,1,1]" for n in range(1, 200)), "more than 100"),
    ],
)
def test_a_bad_schedule_is_one_error(cfg, text, said):
    with pytest.raises(ConfigError, match=said):
        check(parse_overrides(cfg, [f"--data.mixture-schedule={text}"]))


@pytest.mark.parametrize("weights", [(1.0, 1e-7, 1.0), (1e308, 1e308, 1e-320), (1e-5, 1e-9, 1.0)])
def test_a_weight_below_a_sequence_of_a_block_is_refused(cfg, paths, weights):
    """It would be rounded up to one, many times its share. The fix works at once."""
    small = replace(cfg, **{"data.mixture": tuple(map(Source, paths, weights))})
    with pytest.raises(ConfigError, match=r"data\.mixture\[\d\]\.weight = 1e-.* 1/65,536") as error:
        check(small)
    fixed = parse_overrides(small, shlex.split(error.value.fix.removeprefix("use ")))
    check(fixed)
    shares = np.array([source.weight for source in fixed.data.mixture])
    np.testing.assert_array_less(1 / BLOCK, shares / shares.max() / np.sum(shares / shares.max()))


def test_a_schedule_needs_several_sources(cfg):
    one = replace(cfg, **{"data.mixture": (), "data.mixture_schedule": (MixtureWeights(50, (1,)),)})
    with pytest.raises(ConfigError, match=r"needs data\.mixture with several sources"):
        check(one)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1e308, 1e308], [5, 5]),
        ([1e-320, 1e308], [1, 9]),
        ([0, 1], [0, 10]),
        ([3, 0, 7], [3, 0, 7]),
    ],
)
def test_extreme_weights_are_apportioned(weights, counts):
    np.testing.assert_array_equal(apportion(weights, 10), counts)


class OfSources(Loss):
    """A loss that reads the source of each token."""

    reads = ("source",)

    def __call__(self, scores, batch):
        return scores.logsumexp() - scores.label(), 1.0 + batch.source


def test_a_loss_may_read_the_source_of_each_token(cfg, paths):
    """Of mixtures, and of one source; on every mesh the same. Without such a loss, none is sent."""
    reading = replace(cfg, **{"train.loss": OfSources()})
    loader = Loader(reading, mesh_of(1), "train")
    for step in range(4):
        batch = loader.host_rows(step, np.arange(BATCH))
        np.testing.assert_array_equal(
            batch.source, np.broadcast_to(batch.tokens[:, :1], batch.tokens.shape)
        )
    # Rows have one source each, so the order of tokens on a sequence axis does not matter.
    axes = {"sequence": 2, "data": 2}
    split = Loader(
        replace(reading, **{f"parallel.{a}": n for a, n in axes.items()}),
        mesh_of(4, **axes),
        "train",
    )
    wanted = loader.host_rows(1, np.arange(BATCH)).source
    np.testing.assert_array_equal(split.batch(1).source, wanted)
    one = replace(reading, **{"data.mixture": (), "data.path": paths[1]})
    assert not Loader(one, mesh_of(1), "train").host_rows(0, np.arange(BATCH)).source.any()
    assert Loader(cfg, mesh_of(1), "train").batch(0).extra == {}
