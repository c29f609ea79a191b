"""Data and its order, resumes, evaluations, and where a checkpoint has layers."""

from tests.mutants.fault import Fault

DENSE = "llama3_8b data=2,tensor=2"
CHUNKS = "llama3_8b pipeline=2,virtual_stages=4,num_microbatches=4"

LOADER, PACKING = "jaxpar/data/loader.py", "jaxpar/data/packing.py"
EVALUATION = "jaxpar/training/evaluation.py"

FAULTS = (
    Fault(
        name="labels_cross_documents",
        file=PACKING,
        old="labels=np.where(begins[:, 1:], np.int32(IGNORED), labels),",
        new="labels=labels,",
        certify=DENSE,
        tests=("tests/data/test_packing.py::test_by_hand",),
    ),
    Fault(
        name="documents_begin_one_token_late",
        file=PACKING,
        old="    begins[rows[inside], columns[inside]] = True\n",
        new="    begins[rows[inside], np.minimum(columns[inside] + 1, length - 1)] = True\n",
        certify=DENSE,
        tests=("tests/data/test_packing.py::test_against_the_loop",),
    ),
    Fault(
        name="positions_go_on_through_documents",
        file=PACKING,
        old="positions=place - each(columns),",
        new="positions=np.array(place),",
        certify=DENSE,
        tests=("tests/data/test_packing.py::test_by_hand",),
    ),
    Fault(
        name="targets_one_token_early",
        file=PACKING,
        old="labels = np.where(ignored[:, 1:], np.int32(IGNORED), labels)",
        new="labels = np.where(ignored[:, :-1], np.int32(IGNORED), labels)",
        certify="llama_1b_chat data=2,tensor=2",
        tests=("tests/data/test_chat.py::test_only_targets_are_labels",),
    ),
    Fault(
        name="first_batch_is_never_read",
        file=LOADER,
        old="numbers += sequences_before(self._cfg, batch)",
        new="numbers += sequences_before(self._cfg, batch + 1)",
        certify=DENSE,
        tests=("tests/data/test_loader.py::test_rows_are_the_windows_of_the_sequence",),
    ),
    Fault(
        name="loader_ignores_the_order_of_tokens",
        file=LOADER,
        old="return packed if order is None else jax.tree.map(lambda x_NT: x_NT[:, order], packed)",
        new="return packed",
        certify="deepseek_v3 expert=2,sequence=2 --model.mtp-depth 1",
        tests=("tests/data/test_loader.py::test_order_moves_columns",),
    ),
    Fault(
        name="ranks_read_the_rows_of_their_neighbor",
        file=LOADER,
        old="local = np.searchsorted(rows, first)",
        new="local = (np.searchsorted(rows, first) + end - first) % len(rows)",
        certify="llama3_8b data=4",
        tests=("tests/data/test_loader.py::test_same_batch_on_every_mesh",),
    ),
    Fault(
        name="every_epoch_has_the_same_order",
        file="jaxpar/data/shuffle.py",
        old="keys = _mixed(epochs + _mixed(",
        new="keys = _mixed(0 * epochs + _mixed(",
        certify=DENSE,
        tests=("tests/data/test_shuffle.py::test_epochs_and_seeds_have_orders_of_their_own",),
    ),
    Fault(
        name="blocks_of_a_mixture_repeat_sequences",
        file="jaxpar/data/mixture.py",
        old="before[here] = block * self.counts[sources[here]] + rank_of[within[here]]",
        new="before[here] = rank_of[within[here]]",
        certify=DENSE,
        tests=("tests/data/test_mixture.py",),
    ),
    Fault(
        name="sources_share_an_order",
        file=LOADER,
        old='return [zlib.crc32(f"{seed} {i}".encode()) & 0x7FFF_FFFF for i in range(num_sources)]',
        new="return [seed] * num_sources",
        certify=DENSE,
        tests=("tests/data/test_mixture.py::test_sources_of_one_size_are_shuffled_apart",),
    ),
    Fault(
        name="skipped_batches_begin_one_late",
        file="jaxpar/data/skips.py",
        old="            if batch < first:\n",
        new="            if batch <= first:\n",
        certify=DENSE,
        tests=("tests/training/test_guards.py::test_batches_left_out_by_arithmetic",),
    ),
    Fault(
        name="held_out_mean_of_batches_means",
        source="torchtitan 2206",
        file="jaxpar/step/evaluating.py",
        old="return total / divisor if divisor else None",
        new="means = [np.asarray(part, np.float64) / float(n) for part, n in fetched if n]\n"
        "    return np.mean(means, axis=0) if divisor else None",
        certify=DENSE,
        tests=(
            "tests/training/test_evaluation.py"
            "::test_named_sets_and_the_test_split_have_losses_of_their_own",
        ),
    ),
    Fault(
        name="rows_that_complete_a_batch_have_labels",
        file=LOADER,
        old="host, own >= len(part))",
        new="host, own > len(part))",
        certify=DENSE,
        tests=("tests/data/test_finite_sets.py::test_each_label_counts_once",),
    ),
    Fault(
        name="evaluation_sums_over_tensor",
        file="jaxpar/step/train_step.py",
        old="    sums = psum(sums, axes)\n    count = objective.count(s.batch, axes)",
        new="    sums = psum(varying(sums), (*axes, 'tensor', 'pipeline'))\n"
        "    count = objective.count(s.batch, axes)",
        certify=DENSE,
        tests=("tests/training/test_evaluation.py",),
    ),
    Fault(
        name="average_is_not_what_is_evaluated",
        file=EVALUATION,
        old="params = averaged(state, self.cfg) if name == AVERAGED else state.params",
        new="params = state.params",
        certify="llama3_8b data=2,tensor=2 --optimizer.ema.decay 0.9",
        tests=(
            "tests/training/test_evaluation.py"
            "::test_it_has_a_loss_of_its_own_and_the_programs_take_it",
        ),
    ),
    Fault(
        name="layers_are_saved_in_the_order_of_the_mesh",
        file="jaxpar/step/state.py",
        old="_take(x.sharding, x.ndim)(x, np.argsort(order))",
        new="_take(x.sharding, x.ndim)(x, order)",
        certify=CHUNKS,
        tests=("tests/checkpoint/test_checkpoint.py",),
    ),
    Fault(
        name="layers_of_unequal_stages_in_the_order_of_slots",
        file="jaxpar/step/unequal_stages.py",
        old="slots = np.argsort(np.where(order == EMPTY, len(order), order), stable=True)",
        new="slots = np.argsort(order == EMPTY, stable=True)",
        certify="llama3_8b pipeline=2,virtual_stages=2,num_microbatches=4,layers_per_stage=2,1,1,1",
        tests=("tests/checkpoint/test_unequal_stages.py",),
    ),
    Fault(
        name="restored_moments_are_zero",
        file="jaxpar/step/conversions.py",
        old="    return state.with_extra(**{AVERAGED: jax.tree.map(stored, *averages)})",
        new="    zeros = lambda _, __, moment: jax.tree.map(jnp.zeros_like, moment)  # noqa: E731\n"
        "    state = dataclasses.replace(\n"
        "        state, opt_state=moments.map_moments(zeros, specs, state.opt_state))\n"
        "    return state.with_extra(**{AVERAGED: jax.tree.map(stored, *averages)})",
        certify=DENSE,
        tests=("tests/checkpoint/test_checkpoint.py::test_resume",),
    ),
    Fault(
        name="processes_read_the_first_rows",
        file=LOADER,
        old="return np.unique(np.concatenate([np.arange(*r, dtype=np.int64) for r in ranges]))",
        new="return np.arange(sum(len(range(*r)) for r in ranges), dtype=np.int64)",
        certify="llama3_8b data=4",
    ),
    Fault(
        name="sequences_before_a_batch_ignore_smaller_batches",
        file="jaxpar/config/lists/step_sizes.py",
        old="return step_sizes(cfg).tokens_before(batch) // cfg.data.seq_len",
        new="return batch * cfg.train.global_batch_size",
        certify=DENSE,
    ),
    Fault(
        name="batches_grow_one_step_late",
        file="jaxpar/config/lists/step_sizes.py",
        old="bisect.bisect_right(self.sizes, step, key",
        new="bisect.bisect_left(self.sizes, max(step, 1), key",
        certify=DENSE,
    ),
    Fault(
        name="pieces_of_sequences_repeat_the_first",
        file=LOADER,
        old="* (self._cfg.data.seq_len // length) + pieces",
        new="* (self._cfg.data.seq_len // length) + 0 * pieces",
        certify=DENSE,
    ),
    Fault(
        name="sources_begin_anew_with_new_weights",
        file="jaxpar/data/mixture.py",
        old="sources[here], before[here] = found, earlier + self._before[at][found]",
        new="sources[here], before[here] = found, earlier",
        certify=DENSE,
    ),
    Fault(
        name="held_out_batches_begin_one_late",
        file=LOADER,
        old="            part = numbers[start : start + size]\n",
        new="            part = numbers[min(start + 1, len(numbers) - 1) : start + 1 + size]\n",
        certify=DENSE,
    ),
    Fault(
        name="evaluation_divides_by_all_tokens",
        file="jaxpar/step/evaluating.py",
        old="divisor = sum(float(count) for _, count in fetched)",
        new="divisor = max(float(count) for _, count in fetched) * len(fetched)",
        certify=DENSE,
    ),
    Fault(
        name="labels_of_pairs_are_their_tokens",
        file="jaxpar/data/pairs.py",
        old="labels[n, place] = np.where(targets, dataset.tokens[part], np.int32(IGNORED))",
        new="own = dataset.tokens[part.start - 1 : part.stop - 1]\n"
        "            labels[n, place] = np.where(targets, own, np.int32(IGNORED))",
        certify="llama_1b_dpo data=2,tensor=2",
    ),
    Fault(
        name="references_of_pairs_one_token_early",
        file="jaxpar/data/pairs.py",
        old="scores[n, place] = np.where(targets, reference[part], 0.0)",
        new="early = reference[part.start - 1 : part.stop - 1]\n"
        "                scores[n, place] = np.where(targets, early, 0.0)",
        certify="llama_1b_dpo data=2,tensor=2",
    ),
    Fault(
        name="updates_of_layers_relative_to_the_new_weights",
        file="jaxpar/step/features/layer_metrics.py",
        old="s.layer_squares(changes) / s.layer_squares(s.old)",
        new="s.layer_squares(changes) / s.layer_squares(s.trainable)",
        certify=DENSE,
    ),
    Fault(
        name="fullest_experts_relative_to_the_sum",
        file="jaxpar/step/features/layer_metrics.py",
        old="jnp.max(rows, axis=1) / jnp.mean(rows, axis=1)",
        new="jnp.max(rows, axis=1) / jnp.sum(rows, axis=1)",
        certify="quickstart_moe expert=2,data=2",
    ),
    Fault(
        name="order_of_sequences_ignores_the_seed",
        file=LOADER,
        old="seeds = source_seeds(cfg.train.seed if split == TRAIN else None,",
        new="seeds = source_seeds(0 if split == TRAIN else None,",
        certify=DENSE,
    ),
    Fault(
        name="initial_weights_ignore_the_seed",
        file="jaxpar/sharding/initial_values.py",
        old="root = seed if is_key else jax.random.key(seed)",
        new="root = seed if is_key else jax.random.key(0)",
        certify=DENSE,
    ),
    Fault(
        name="initial_weights_of_equal_names_share_a_key",
        file="jaxpar/sharding/initial_values.py",
        old="jax.random.fold_in(root, zlib.crc32(path.encode()))",
        new="jax.random.fold_in(root, zlib.crc32(path.encode()[:8]))",
        certify=DENSE,
    ),
)
