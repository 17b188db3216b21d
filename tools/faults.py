"""Plants faults in a copy of this checkout, one at a time, and runs the test that is to find each:

    python tools/faults.py             all of them
    python tools/faults.py NAME …      some

A fault is a few words of a file that are exchanged. It is caught when its test fails, and passes without it. Whoever
mends a defect adds the defect here. The exit code is 1 if a fault was missed.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is exchanged, and what finds it.

    Attributes:
      file: in the package.
      before: words that are in it once.
      after: what takes their place.
      test: the file of a test, `::`, and its name.
    """

    file: str
    before: str
    after: str
    test: str


_WHOLE = "tests/training/test_durable.py::"
_TIER = "tests/training/test_tiers.py::"
_LOADER = "tests/data/test_loader.py::"
_CACHE = "tests/data/test_cache.py::"
_DECODERS = "tests/serving/test_decoders.py::"
_SAME = "tests/training/test_same_run.py::"
_RUNS = "tests/integration/test_train.py::"
_WORKDIRS = "tests/integration/test_workdirs.py::"
_LOCKS = "tests/integration/test_locks.py::"
_BUCKETS = "tests/data/test_in_buckets.py::"
_DIGESTS = "tests/compute/test_digests.py::"
_DAMAGE = "tests/checkpoints/test_damage.py::"

FAULTS = {
    # Saving.
    "small_file_not_synced": Fault(
        "base/places.py", "os.fsync(file.fileno())", "pass",
        _WHOLE + "test_a_file_is_on_the_disk_before_it_has_its_name",
    ),
    "tier_not_synced": Fault(
        "checkpoints/shards.py", "os.fsync(file.fileno())", "pass",
        _WHOLE + "test_a_file_is_on_the_disk_before_it_has_its_name",
    ),
    "prepared_file_not_synced": Fault(
        "data/preparation/output.py", "os.fsync(opened.fileno())", "pass",
        _WHOLE + "test_a_file_is_on_the_disk_before_it_has_its_name",
    ),
    "tier_written_under_its_name": Fault(
        "checkpoints/shards.py", 'new = path.with_name(f"{path.name}.new")', "new = path",
        _WHOLE + "test_a_file_is_on_the_disk_before_it_has_its_name",
    ),
    "tier_not_copied": Fault(
        "checkpoints/shards.py", "np.asarray(x).copy() if _on_cpu(x)", "np.asarray(x) if _on_cpu(x)",
        _TIER + "test_a_copy_is_in_no_memory_of_a_device",
    ),
    "tier_keeps_its_last_alone": Fault(
        "checkpoints/tiers.py", "lambda session, old: old != self._complete)", "lambda session, old: True)",
        _TIER + "test_the_newest_state_comes_back_after_a_restart",
    ),
    "one_too_many_is_kept": Fault(
        "checkpoints/saving.py", "old = steps[: -self._config.keep]", "old = steps[: -self._config.keep - 1]",
        _RUNS + "test_only_the_last_checkpoints_and_the_chosen_ones_are_kept",
    ),
    "best_is_kept_unasked": Fault(
        "training/actions/evaluate.py", "best = self._run.config.checkpoint.best and self._goals.best",
        "best = self._goals.best",
        _WORKDIRS + "test_the_best_step_is_kept_for_ever_only_where_the_config_says_so",
    ),
    "best_of_the_last_evaluation_is_not_noted": Fault(
        "training/actions/evaluate.py", "        self._goals.write_best(self._run.workdir)\n", "",
        _WORKDIRS + "test_the_best_is_that_of_the_result_where_the_last_evaluation_is_the_best",
    ),
    "evaluation_lost_at_a_stop": Fault(
        "training/actions/evaluate.py", "bool(progress.ended) or is_due(step, self._every)", "bool(progress.ended)",
        _WORKDIRS + "test_an_evaluation_that_is_due_where_a_stop_comes_is_made_first_by_the_next_start",
    ),
    "nan_is_the_best": Fault(
        "evaluation/metric_order.py", "        if math.isnan(value):\n            return False\n", "",
        "tests/training/test_goals.py::"
        "test_a_value_that_is_not_a_number_is_never_the_best_and_does_not_reset_patience",
    ),
    "description_not_synced": Fault(
        "checkpoints/committing.py", "                    _sync(file)", "                    pass",
        _WHOLE + "test_a_checkpoint_is_on_the_disk_before_it_has_its_name",
    ),
    "writes_end_by_the_clock_of_the_day": Fault(
        "checkpoints/committing.py", "[_in_thread(write.result) for write in writes]", "writes",
        "tests/checkpoints/test_saving.py::test_a_clock_that_is_set_while_a_save_waits_does_not_end_it",
    ),
    # Leaving.
    "a_thread_asks_jax_while_python_ends": Fault(
        "devices/processes.py", "        _left.set()\n        listener.join(_LEAVE_SECONDS)", "        pass",
        "tests/test_processes.py::test_three_processes_agree_and_tell_who_does_not_come",
    ),
    # Resuming.
    "tier_checksum_not_compared": Fault(
        "checkpoints/shards.py", "or zlib.crc32(content) != checksum:", "or False:",
        _TIER + "test_a_damaged_file_is_reported_and_the_one_before_is_used",
    ),
    "tier_of_another_run_is_used": Fault(
        "checkpoints/tiers.py", 'if file.header["run"] != self._run:', "if False:",
        _TIER + "test_files_of_an_earlier_run_in_the_workdir_are_not_used_and_soon_deleted",
    ),
    "newer_local_state_is_passed_over": Fault(
        "checkpoints/saving.py", "if other := elsewhere(steps):", "if other := not reasons and elsewhere(steps):",
        _RUNS + "test_a_local_state_is_used_that_is_newer_than_the_good_checkpoints",
    ),
    "marks_of_tier_not_compared": Fault(
        "checkpoints/tiers.py", "if changed := self._changed(parts, description):", "if changed := '':",
        _TIER + "test_a_file_whose_bits_are_not_those_of_the_audit_is_reported_and_the_one_before_is_used",
    ),
    "no_descriptors_are_damage": Fault(
        "checkpoints/storage.py", "limits.as_user_error(cause) if limits.is_shortage(cause) else None", "None",
        _DAMAGE + "test_what_cannot_be_opened_for_want_of_descriptors_is_not_damaged",
    ),
    "reads_go_on_after_one_failed": Fault(
        "checkpoints/handlers.py",
        "            await asyncio.gather(*asyncio.all_tasks() - before, return_exceptions=True)\n", "",
        _DAMAGE + "test_of_a_damaged_state_nothing_is_under_way_when_that_is_said",
    ),
    "order_within_an_array_does_not_count": Fault(
        "compute/digests.py", "position = np.arange(first, first + part.size, dtype=np.uint32)",
        "position = np.zeros(part.size, np.uint32)", _DIGESTS + "test_what_a_sum_of_bits_misses_is_seen",
    ),
    "order_within_an_array_does_not_count_on_devices": Fault(
        "compute/digests.py",
        "        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride)\n",
        "        pass\n",
        _DIGESTS + "test_host_and_devices_compute_the_same_marks_of_all_dtypes",
    ),
    "seal_not_compared": Fault(
        "checkpoints/descriptions.py", "if description.get(_SEAL) == _seal_of(rest) else None", "",
        _WORKDIRS + "test_a_description_with_another_value_is_not_the_one_that_was_saved",
    ),
    "other_images_are_accepted": Fault(
        "training/guards.py", "or fingerprint.same(before, now)", "or True",
        _SAME + "test_other_training_images_are_a_change_that_is_said",
    ),
    "earlier_fingerprints_are_refused": Fault(
        "data/sources/fingerprint.py", 'before == now or before == now.partition("-")[0]', "before == now",
        _SAME + "test_runs_begun_before_fingerprints_had_the_contents_of_buckets_resume",
    ),
    "contents_of_buckets_are_not_in_fingerprints": Fault(
        "data/sources/fingerprint.py", "{digest(paths, contents)}", "{digest(paths)}",
        _BUCKETS + "test_a_picture_that_is_rewritten_is_another_data_set_and_leaves_the_cache",
    ),
    # The cache.
    "cache_serves_what_was_rewritten": Fault(
        "data/cache.py", "return record if identity == self._identity(index) else None", "return record",
        _BUCKETS + "test_a_picture_that_is_rewritten_is_another_data_set_and_leaves_the_cache",
    ),
    "cache_entry_not_compared": Fault(
        "data/cache.py", "if own_checksum == _checksum(entry, index):", "if True:",
        _CACHE + "test_what_is_damaged_is_read_again_and_mended",
    ),
    "cache_without_a_bound": Fault(
        "data/cache.py", "if size > room:", "if False:",
        _CACHE + "test_it_is_bounded_over_all_data_sets_and_names_the_bound",
    ),
    # Order.
    "every_epoch_is_the_same": Fault(
        "data/order.py", "num_examples, (seed, epoch))", "num_examples, (seed, 0))",
        _LOADER + "test_every_epoch_is_another_permutation_of_all_examples",
    ),
    "seeds_share_epochs": Fault(
        "data/order.py", "num_examples, (seed, epoch))", "num_examples, (seed + epoch,))",
        _LOADER + "test_seeds_do_not_share_epochs",
    ),
    "skipped_data_are_counted_one_short": Fault(
        "data/order.py", "            step += count", "            step += count - 1",
        "tests/data/test_reading.py::test_batches_have_the_same_bits_with_steps_skipped",
    ),
    "balanced_classes_in_one_order": Fault(
        "data/balanced.py", "permuted(np.arange(size), size, (seed, _CIRCLES))", "np.arange(size)",
        "tests/data/test_balanced.py::test_the_seed_decides_which_and_in_which_order",
    ),
    # Masks.
    "padding_counts_as_an_example": Fault(
        "data/batches.py", 'batch["mask"][:] = ids < len(self.source)', 'batch["mask"][:] = ids <= len(self.source)',
        _LOADER + "test_evaluation_sees_every_example_once_and_masks_the_rest",
    ),
    # Loops in which devices wait for each other.
    "masks_are_drawn_until_those_of_all_devices_are": Fault(
        "objectives/dino/block_masks.py", "partitioning.by_batch(jax.vmap(one), keys, counts)",
        "jax.vmap(one)(keys, counts)",
        "tests/objectives/test_dino.py::test_devices_draw_the_masks_of_their_own_images_and_ask_no_other",
    ),
    "segments_are_assigned_until_those_of_all_devices_are": Fault(
        "objectives/segmentation/losses.py",
        "partitioning.by_batch(jax.vmap(jax.vmap(assign, (0, None))), layer_costs, count)",
        "jax.vmap(jax.vmap(assign, (0, None)))(layer_costs, count)",
        "tests/objectives/test_segmentation.py::test_the_loss_of_an_example_does_not_depend_on_the_others",
    ),
    # Limits.
    "decoders_have_no_limit_of_memory": Fault(
        "serving/decode_worker.py", "resource.setrlimit(resource.RLIMIT_AS, (most, most))", "pass",
        _DECODERS + "test_an_image_that_needs_more_memory_than_there_is_is_refused",
    ),
    "decoders_have_no_limit_of_time": Fault(
        "serving/decode_worker.py", "        _limit_time()\n        try:", "        try:",
        _DECODERS + "test_a_process_has_the_limits_of_time_and_memory_that_are_promised",
    ),
    "large_files_are_read": Fault(
        "data/decoding/images.py", "if size > MOST_BYTES:", "if False:",
        "tests/data/test_door.py::test_only_regular_files_of_bounded_size_are_read",
    ),
    "a_client_that_goes_leaves_a_traceback": Fault(
        "serving/server.py", "except ConnectionError:", "except ZeroDivisionError:",
        _DECODERS + "test_a_client_that_vanishes_leaves_a_line",
    ),
    "images_of_a_form_have_no_limit": Fault(
        "serving/server.py", "if len(part.content) > self._limits.bytes:", "if False:",
        "tests/serving/test_forms.py::test_several_images_get_what_each_gets_alone_and_a_bad_one_its_own_error",
    ),
    # Locks.
    "lock_does_not_lock": Fault(
        "base/lock.py", "fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
        _WORKDIRS + "test_two_runs_in_one_folder_are_refused_and_a_dead_one_holds_no_lock",
    ),
    "lock_of_any_generation_is_replaced": Fault(
        "base/buckets.py", 'ifGenerationMatch=generation or "0",', "",
        _LOCKS + "test_of_two_that_find_it_free_one_has_it_although_its_write_came_second",
    ),
}  # fmt: skip


def copy_checkout(folder: pathlib.Path) -> None:
    """Copies the files of this checkout that version control knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def planted(fault: Fault, text: str) -> str:
    """A file's text with a fault. Raises `ValueError` unless the words to exchange are in it once."""
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.file} has {fault.before!r} {text.count(fault.before)} times")
    return text.replace(fault.before, fault.after)


def passes(copy: pathlib.Path, tests: list[str]) -> bool:
    """Whether tests pass in a copy. Raises `RuntimeError` if they cannot be run."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-x", "-q", *tests],
        cwd=copy, env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode not in (0, 1) or " error" in ran.stdout.splitlines()[-1]:
        raise RuntimeError(f"{' '.join(tests)} cannot be run:\n{ran.stdout}{ran.stderr}")
    return ran.returncode == 0


def missed(names: list[str], copy: pathlib.Path) -> list[str]:
    """Those of the faults that their tests do not find, planted one after the other in a copy of this checkout."""
    found = []
    for name in names:
        fault = FAULTS[name]
        file = copy / "vit_jax" / fault.file
        text = file.read_text()
        try:
            file.write_text(planted(fault, text))
            caught = not passes(copy, [fault.test])
        finally:
            file.write_text(text)
        print(f"{'caught' if caught else 'MISSED'}  {name}  {fault.test}", flush=True)
        if not caught:
            found.append(name)
    return found


def main() -> None:
    """Plants the faults that the command line names, or all."""
    names = sys.argv[1:] or list(FAULTS)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        copy_checkout(copy)
        if not passes(copy, sorted({FAULTS[name].test for name in names})):
            sys.exit("the tests fail without a fault")
        found = missed(names, copy)
    print(f"{len(names) - len(found)} of {len(names)} faults were caught")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
