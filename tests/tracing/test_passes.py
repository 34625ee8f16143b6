"""The list of passes: what its table says is what runs."""

import re

import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax._src.tracing import passes


def test_the_table_names_the_passes_in_the_order_in_which_they_run():
    named = re.findall(r"^\| ``([\w.]+)`` \|", passes.__doc__, flags=re.MULTILINE)
    here = [one.__name__ for one in (passes.captured, *passes.VARIANT_PASSES, *passes.PROGRAM_PASSES)]
    assert named[: len(here)] == here
    assert named[len(here) :] == ["watch_finite", "make_whole", "cut_before_updates"]


def test_each_size_of_batch_goes_through_all_passes(monkeypatch):
    """Two sizes are two variants: each is captured, resolved and analysed; then the program is, once."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    ran = []

    def noting(one):
        def run(*args):
            ran.append(one.__name__)
            return one(*args)

        return run

    monkeypatch.setattr(passes, "VARIANT_PASSES", list(map(noting, passes.VARIANT_PASSES)))
    monkeypatch.setattr(passes, "PROGRAM_PASSES", list(map(noting, passes.PROGRAM_PASSES)))
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(2 + context.replica_id_in_sync_group, np.float32)
    )
    total = strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", jnp.sum(x)), args=(batch,))
    assert float(total.values[0]) == 5.0
    of_variants = ["report_capture", "take_rows", "resolve_marks", "report_gradients", "analyse_replication"]
    num_sizes = 2
    assert ran[: len(ran) - 3] == of_variants * (len(ran[:-3]) // 5)
    assert ran.count("analyse_replication") >= num_sizes
    assert ran[-3:] == ["open_calls", "compare_sizes", "check_synchronised"]
