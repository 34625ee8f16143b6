"""Reading compiled programs: CPU's from the compiler itself, TPU's and GPU's from parts of their text."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._plan.hlo import read_hlo
from replicax._src.devices.plan import Collective

# A loop of 80 steps whose length only its condition shows; its all-gather appears in the text three times: its start,
# a step of another computation, and its end. All collectives have one channel, like those of a shard_map.
TPU_LOOP = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.68 (p.0: f32[4,16]) -> (f32[4,16], f32[32,16], u32[]) {
  %p.0 = f32[4,16]{1,0:T(8,128)} parameter(0)
  %all-gather.3 = f32[32,16]{1,0:T(8,128)} all-gather(%p.0), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  ROOT %custom-call.1 = (f32[4,16]{1,0:T(8,128)}, f32[32,16]{1,0:T(8,128)}, u32[]{:S(2)}) custom-call(%all-gather.3), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.116 (p.1: f32[4,16]) -> f32[32,16] {
  %p.1 = f32[4,16]{1,0:T(8,128)} parameter(0)
  ROOT %all-gather.4 = f32[32,16]{1,0:T(8,128)} all-gather(%p.1), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}

%fused_computation.70 (p.3: f32[4,16], p.4: f32[32,16]) -> f32[32,16] {
  %p.3 = f32[4,16]{1,0:T(8,128)} parameter(0)
  %p.4 = f32[32,16]{1,0:T(8,128)} parameter(1)
  %all-gather.5 = f32[32,16]{1,0:T(8,128)} all-gather(%p.3), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %all-to-all.1 = f32[32,16]{1,0:T(8,128)} all-to-all(%p.4), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %custom-call.3 = f32[32,16]{1,0:T(8,128)} custom-call(%p.3, %p.4, %all-gather.5), custom_call_target="AsyncCollectiveDone"
}

%body (arg: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {
  %arg = (s32[]{:T(128)}, f32[4,16]{1,0:T(8,128)}) parameter(0)
  %gte.1 = f32[4,16]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %async-collective-start = (f32[4,16]{1,0:T(8,128)}, f32[32,16]{1,0:T(8,128)}, u32[]{:S(2)}) fusion(%gte.1), kind=kCustom, calls=%fused_computation.68
  %fusion.1 = f32[32,16]{1,0:T(8,128)} fusion(%gte.1), kind=kCustom, calls=%async_collective_fusion.116, backend_config={"estimated_cycles":"1000"}
  %async-collective-done = f32[32,16]{1,0:T(8,128)} fusion(%gte.1, %fusion.1), kind=kCustom, calls=%fused_computation.70
  ROOT %tuple = (s32[]{:T(128)}, f32[4,16]{1,0:T(8,128)}) tuple(%gte.1, %gte.1)
}

%condition (arg.1: (s32[], f32[4,16])) -> pred[] {
  %arg.1 = (s32[]{:T(128)}, f32[4,16]{1,0:T(8,128)}) parameter(0)
  %gte.2 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  %constant.1 = s32[]{:T(128)} constant(80), metadata={op_name="jit(step)"}
  ROOT %compare = pred[]{:T(512)} compare(%gte.2, %constant.1), direction=LT
}

%all-reduce-scatter.1 (p.2: f32[64,16]) -> f32[8,16] {
  %p.2 = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[64,16]{1,0:T(8,128)} all-reduce(%p.2), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.1 = f32[8,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %p.2), dynamic_slice_sizes={8,16}
}

%all-reduce-scatter.2 (p.5: f32[64,16]) -> f32[8,16] {
  %p.5 = f32[64,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.2 = f32[64,16]{1,0:T(8,128)} all-reduce(%p.5), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %dynamic-slice.2 = f32[8,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.2, %p.5), dynamic_slice_sizes={8,16}
}

ENTRY %main (x: f32[4,16]) -> f32[4,16] {
  %x = f32[4,16]{1,0:T(8,128)} parameter(0)
  %y = f32[64,16]{1,0:T(8,128)} broadcast(%x), dimensions={}, backend_config={"estimated_cycles":"9223372036854775807"}
  %while.1 = (s32[]{:T(128)}, f32[4,16]{1,0:T(8,128)}) while(%tuple.9), condition=%condition, body=%body
  %fusion.2 = f32[8,16]{1,0:T(8,128)} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={"estimated_cycles":"500"}
  %fusion.3 = f32[8,16]{1,0:T(8,128)} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %gte.3 = f32[4,16]{1,0:T(8,128)} get-tuple-element(%while.1), index=1
}
"""

# Starts and ends; the type of a start has its input and output; the text has the trip count.
GPU_LOOP = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%body (arg: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %arg = (s32[], bf16[8,16]{1,0}) parameter(0)
  %gte.1 = bf16[8,16]{1,0} get-tuple-element(%arg), index=1
  %all-gather-start.1 = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%gte.1), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
  %all-gather-done.1 = bf16[16,16]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %tuple.1 = (s32[], bf16[8,16]{1,0}) tuple(%gte.1, %gte.1)
}

%cond (arg.1: (s32[], bf16[8,16])) -> pred[] {
  ROOT %arg.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
}

ENTRY %main (x: f32[10], y: f32[6]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  %y = f32[6]{0} parameter(1)
  %all-reduce-start.1 = (f32[10]{0}, f32[6]{0}) all-reduce-start(%x, %y), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  %all-reduce-done.1 = (f32[10]{0}, f32[6]{0}) all-reduce-done(%all-reduce-start.1)
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%tuple.2), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %gte.9 = f32[10]{0} get-tuple-element(%all-reduce-done.1), index=0
}
"""


def test_tpu():
    found = read_hlo(TPU_LOOP, 8)
    assert found.collectives == [
        Collective("all-gather", 32 * 16 * 4, 8, 80),
        Collective("all-to-all", 32 * 16 * 4, 8, 80),  # beside the end of another
        Collective("reduce-scatter", 64 * 16 * 4, 8, 2),
    ]
    assert found.cycles == 80 * 1000 + 500


def test_gpu():
    assert read_hlo(GPU_LOOP, 4).collectives == [
        Collective("all-gather", 16 * 16 * 2, 2, 12),
        Collective("all-reduce", 16 * 4, 4, 1),
    ]


def test_cpu_by_its_compiler():
    mesh = Mesh(jax.devices()[:4], ("replica",), axis_types=(AxisType.Auto,))
    row = PartitionSpec("replica")

    def step(x):
        total = jax.lax.scan(lambda h, _: (jax.lax.psum(jnp.sin(h), "replica"), None), x, length=6)[0]
        return jax.lax.all_gather(total, "replica", tiled=True)

    placed = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=row, out_specs=row, check_vma=False))
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32, sharding=NamedSharding(mesh, row))
    found = read_hlo(placed.lower(x).compile().as_text(), 4)
    assert found.collectives == [Collective("all-reduce", 1024, 4, 6), Collective("all-gather", 4096, 4, 1)]


def test_two_collectives_of_one_channel_in_one_computation():
    """The form in which CPU's compiler leaves two sums, one of which waits for the other."""
    text = """\
ENTRY %main (x: f32[86], y: f32[]) -> f32[86] {
  %x = f32[86]{0} parameter(0)
  %y = f32[] parameter(1)
  %all-reduce.1 = f32[] all-reduce(%y), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %all-reduce.2 = f32[86]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}
"""
    found = sorted(read_hlo(text, 2).collectives, key=lambda one: one.bytes)
    assert found == [Collective("all-reduce", 4, 2, 1), Collective("all-reduce", 86 * 4, 2, 1)]


def test_a_program_without_collectives():
    assert read_hlo(jax.jit(jnp.sin).lower(jnp.zeros(3)).compile().as_text(), 1).collectives == []


def test_groups_on_several_hosts():
    """Of 16 devices on 2 hosts: all, neighbours, those 8 apart, and permutations within and between."""
    text = """\
ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} all-reduce(%x), channel_id=1, replica_groups=[1,16]<=[16], to_apply=%add
  %b = f32[64]{0} all-reduce(%a), channel_id=2, replica_groups=[8,2]<=[16], to_apply=%add
  %c = f32[64]{0} all-reduce(%b), channel_id=3, replica_groups=[8,2]<=[2,8]T(1,0), to_apply=%add
  %d = f32[64]{0} all-reduce(%c), channel_id=4, replica_groups={{0,4,8,12},{1,5,9,13}}, to_apply=%add
  %e = f32[64]{0} collective-permute(%d), channel_id=5, source_target_pairs={{0,1},{1,0}}
  ROOT %f = f32[64]{0} collective-permute(%e), channel_id=6, source_target_pairs={{0,1},{7,8}}
}
"""
    found = read_hlo(text, 16, 8).collectives
    by_group = {(one.kind, one.group_size, one.num_domains): one for one in found}
    reduced, permuted = "all-reduce", "collective-permute"
    assert set(by_group) == {
        (reduced, 16, 2),
        (reduced, 2, 1),
        (reduced, 2, 2),
        (reduced, 4, 2),
        (permuted, 2, 1),
        (permuted, 2, 2),
    }
    sent = {key: (one.link_bytes, one.network_bytes) for key, one in by_group.items()}
    assert sent[reduced, 16, 2] == (2 * 7 / 8 * 256, 2 * 1 / 2 * 256 / 8)
    assert sent[reduced, 2, 1] == (256, 0)
    assert sent[reduced, 2, 2] == (0, 256)
    assert sent[permuted, 2, 1] == (256, 0)
    assert sent[permuted, 2, 2] == (0, 256)


def test_all_reduces_that_replace_other_collectives():
    """One of a shard among zeros, one of which a shard is kept, and a plain one, in the form of TPU's compiler."""
    text = """\
%put (p.0: f32[64,8], p.1: f32[8,8]) -> f32[64,8] {
  %p.0 = f32[64,8]{1,0} parameter(0)
  %p.1 = f32[8,8]{1,0} parameter(1)
  ROOT %dynamic-update-slice.1 = f32[64,8]{1,0} dynamic-update-slice(%p.0, %p.1, %zero, %zero)
}

%cut (p.2: f32[8,8], p.3: f32[64,8]) -> f32[8,8] {
  %p.2 = f32[8,8]{1,0} parameter(0)
  %p.3 = f32[64,8]{1,0} parameter(1)
  %dynamic-slice.1 = f32[8,8]{1,0} dynamic-slice(%p.3, %zero, %zero), dynamic_slice_sizes={8,8}
  ROOT %add.1 = f32[8,8]{1,0} add(%p.2, %dynamic-slice.1)
}

ENTRY %main (w: f32[8,8], g: f32[64,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0)
  %g = f32[64,8]{1,0} parameter(1)
  %fusion.1 = f32[64,8]{1,0} fusion(%zeros, %w), kind=kLoop, calls=%put
  %gathered = f32[64,8]{1,0} all-reduce(%fusion.1), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %scattered = f32[64,8]{1,0} all-reduce(%g), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
  %reduced = f32[64,8]{1,0} all-reduce(%gathered), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
  %fusion.2 = f32[8,8]{1,0} fusion(%w, %scattered), kind=kLoop, calls=%cut
  ROOT %fusion.3 = f32[8,8]{1,0} fusion(%reduced, %scattered), kind=kLoop, calls=%cut
}
"""
    found = read_hlo(text, 8).collectives
    assert {one.stands_for for one in found} == {"all-gather", "reduce-scatter", None}
    assert all(one.kind == "all-reduce" and one.bytes == 64 * 8 * 4 for one in found)


def test_all_reduces_of_several_arrays_are_classified_by_most_bytes():
    text = """\
ENTRY %main (g: f32[64,8], b: f32[1]) -> f32[8,8] {
  %g = f32[64,8]{1,0} parameter(0)
  %b = f32[1]{0} parameter(1)
  %sums = (f32[64,8]{1,0}, f32[1]{0}) all-reduce(%g, %b), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %sum.0 = f32[64,8]{1,0} get-tuple-element(%sums), index=0
  %sum.1 = f32[1]{0} get-tuple-element(%sums), index=1
  %added = f32[1]{0} add(%sum.1, %b)
  ROOT %piece = f32[8,8]{1,0} dynamic-slice(%sum.0, %zero, %zero), dynamic_slice_sizes={8,8}
}
"""
    (of_both,) = read_hlo(text, 8).collectives
    assert (of_both.stands_for, of_both.bytes) == ("reduce-scatter", 64 * 8 * 4 + 4)
    (whole,) = read_hlo(text.replace("dynamic-slice(%sum.0", "slice(%sum.0"), 8).collectives
    assert whole.stands_for is None
