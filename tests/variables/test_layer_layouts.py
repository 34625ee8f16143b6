"""The rules that choose layouts for the variables of layers. (Models: ``keras/test_model_layouts.py``.)"""

import itertools
import re

import pytest

from replicax._src.variables.layer_layouts import (
    DENSE,
    Choice,
    LayerVariable,
    ModelLayer,
    choose_layouts,
    excess_of_device,
    layout_map_of,
)

COLUMNS, ROWS, WHOLE = (None, "logical"), ("logical", None), ()


def layer(path, equation=None, *, kind="Layer", is_embedding=False, **shapes):
    variables = {name: LayerVariable(f"{path}/{name}", shape, 4) for name, shape in shapes.items()}
    return ModelLayer(kind, variables, equation, is_embedding)


def dense(path, taken, made):
    return layer(path, DENSE, kernel=(taken, made), bias=(made,))


def embedding(**shapes):
    return layer("embedding", is_embedding=True, **shapes)


def chosen(layers, num_devices=2):
    return {choice.variable.path: choice.layout for choice in choose_layouts(layers, num_devices)}


def reasons(layers, num_devices=2):
    return {choice.variable.path: choice.reason for choice in choose_layouts(layers, num_devices)}


# --- heads ---------------------------------------------------------------------------------------------

HEADS = {  # who writes them so; the equations of query and output; their kernels with H heads
    "keras": ("abc,cde->abde", "abcd,cde->abe", lambda h: (16, h, 4), lambda h: (h, 4, 16), 1),
    "llama": ("bqm,muh->bquh", "bquh,uhm->bqm", lambda h: (16, h, 4), lambda h: (h, 4, 16), 1),
    "gemma": ("btd,ndh->btnh", "btnh,nhd->btd", lambda h: (h, 16, 4), lambda h: (h, 4, 16), 0),
    "any batch": ("...c,cde->...de", "...cd,cde->...e", lambda h: (16, h, 4), lambda h: (h, 4, 16), 1),
}


@pytest.mark.parametrize("written", HEADS)
def test_attention_is_sharded_by_heads(written):
    makes, takes, query, output, dim = HEADS[written]
    layers = [
        layer("attention/query", makes, kernel=query(4), bias=(4, 4)),
        layer("attention/key", makes, kernel=query(2), bias=(2, 4)),
        layer("attention/attention_output", takes, kernel=output(4), bias=(16,)),
    ]
    by_heads = tuple("logical" if i == dim else None for i in range(3))
    assert chosen(layers) == {
        "attention/query/kernel": by_heads,
        "attention/query/bias": ROWS,
        "attention/key/kernel": by_heads,
        "attention/key/bias": ROWS,
        "attention/attention_output/kernel": ("logical", None, None),
        "attention/attention_output/bias": WHOLE,
    }
    of_four = chosen(layers, 4)
    assert of_four["attention/query/kernel"] == by_heads
    assert of_four["attention/key/kernel"] == of_four["attention/key/bias"] == WHOLE
    assert "heads (2)" in reasons(layers, 4)["attention/key/kernel"]
    assert set(chosen(layers, 3).values()) == {WHOLE}


def test_heads_that_lie_in_one_dim_behind_the_attention():
    def layers(num_heads):
        makes = layer("a/query_key_value", "abc,cde->abde", kernel=(16, num_heads, 48 // num_heads))
        return [makes, layer("a/output", "abc,cd->abd", kernel=(16, 16))]

    assert chosen(layers(4)) == {"a/query_key_value/kernel": (None, "logical", None), "a/output/kernel": ROWS}
    assert set(chosen(layers(1)).values()) == {WHOLE}  # 16 divides, but not the heads


def test_projections_in_one_dim_are_told_by_their_names():
    """A query and a key of T5 would otherwise look like a pair of layers."""
    names = ("query_projector", "key_projector", "value_projector", "output_projector")
    layers = [layer(f"a/{name}", DENSE, kernel=(16, 16)) for name in names]
    assert list(chosen(layers).values()) == [COLUMNS, COLUMNS, COLUMNS, ROWS]
    layers = [
        layer(f"a/{name}", DENSE, kernel=(16, made))
        for name, made in zip(("q_proj", "k_proj", "v_proj", "o_proj"), (16, 4, 4, 16), strict=True)
    ]
    assert list(chosen(layers).values()) == [COLUMNS, WHOLE, WHOLE, ROWS]


# --- dense layers --------------------------------------------------------------------------------------


def test_the_first_of_a_pair_is_sharded_by_columns_and_the_second_by_rows():
    assert chosen([dense("block/up", 16, 64), dense("block/down", 64, 16)]) == {
        "block/up/kernel": COLUMNS,
        "block/up/bias": ("logical",),
        "block/down/kernel": ROWS,
        "block/down/bias": WHOLE,
    }


def test_a_gate_is_sharded_like_the_layer_beside_it():
    layers = [dense("b/up", 16, 64), dense("b/gate", 16, 64), dense("b/down", 64, 16)]
    assert [chosen(layers)[f"b/{name}/kernel"] for name in ("up", "gate", "down")] == [COLUMNS, COLUMNS, ROWS]


def test_chains_are_taken_in_pairs():
    sizes = [64, 64, 64, 64, 8]
    layers = [dense(f"d{i}", *pair) for i, pair in enumerate(itertools.pairwise(sizes))]
    kernels = [layout for path, layout in chosen(layers).items() if path.endswith("kernel")]
    assert kernels == [COLUMNS, ROWS, COLUMNS, ROWS]


def test_layers_of_two_parents_are_no_pair():
    layouts = chosen([dense("a/up", 16, 64), dense("b/down", 64, 16)])
    assert layouts["a/up/kernel"] == COLUMNS  # it makes more than it takes, as logits do
    assert layouts["b/down/kernel"] == WHOLE


def test_hidden_units_that_do_not_divide_leave_both_layers_whole():
    layers = [dense("up", 16, 63), dense("down", 63, 16)]
    assert set(chosen(layers).values()) == {WHOLE}
    assert reasons(layers)["up/kernel"].startswith("its units (63)")


def test_einsums_without_a_rule_stay_whole():
    layers = [
        layer("experts", "ebd,edf->ebf", kernel=(4, 16, 32)),  # a dim of both
        layer("scale", "abc,c->abc", kernel=(16,)),
    ]
    assert set(chosen(layers).values()) == {WHOLE}


# --- embeddings and others -----------------------------------------------------------------------------


def test_embeddings_are_sharded_by_vocabulary():
    assert chosen([embedding(embeddings=(64, 16))]) == {"embedding/embeddings": ROWS}
    untied = chosen([embedding(embeddings=(64, 16), reverse_embeddings=(16, 64))])
    assert untied == {"embedding/embeddings": ROWS, "embedding/reverse_embeddings": COLUMNS}


def test_a_vocabulary_that_does_not_divide_says_which_does():
    layers = [embedding(embeddings=(50257, 16))]
    assert chosen(layers) == {"embedding/embeddings": WHOLE}
    assert "50258" in reasons(layers)["embedding/embeddings"]
    assert chosen([embedding(embeddings=(2, 16))]) == {"embedding/embeddings": WHOLE}  # segments of BERT


def test_unknown_layers_and_variables_stay_whole_with_a_reason():
    layers = [
        layer("lstm", kind="LSTMCell", kernel=(16, 64), recurrent_kernel=(16, 64)),
        layer("dense", DENSE, kind="Dense", kernel=(16, 64), bias=(64,), lora_kernel_a=(16, 4)),
    ]
    layouts = chosen(layers)
    assert [path for path, layout in layouts.items() if layout] == ["dense/kernel", "dense/bias"]
    assert "LSTMCell" in reasons(layers)["lstm/kernel"]
    assert all(reason for path, reason in reasons(layers).items() if not layouts[path])


# --- the map -------------------------------------------------------------------------------------------


def choices(*given):
    return [
        Choice(LayerVariable(path, (8, 8), num_bytes), layout, "" if layout else "why")
        for path, layout, num_bytes in given
    ]


def test_a_number_stands_for_all_where_the_layouts_agree():
    layout_map = layout_map_of(
        choices(
            ("block_0/up/kernel", COLUMNS, 4), ("block_1/up/kernel", COLUMNS, 4), ("dense/kernel", ROWS, 4)
        ),
        ["dense"],
    )
    assert repr(layout_map) == repr(
        type(layout_map)({r"block_\d+/up/kernel": COLUMNS, r"dense(_\d+)?/kernel": ROWS})
    )
    assert layout_map["block_17/up/kernel"] == ((), ("logical",))
    assert layout_map["dense_5/kernel"] == (("logical",), ())


def test_numbers_that_select_a_layout_are_kept():
    given = choices(("dense/kernel", COLUMNS, 4), ("dense_1/kernel", ROWS, 4), ("dense_2/kernel", WHOLE, 4))
    layout_map = layout_map_of(given, ["dense"])
    found = [layout_map[choice.variable.path] for choice in given]
    assert found == [((), ("logical",)), (("logical",), ()), None]


def test_a_replicated_variable_is_not_found_by_a_part_of_its_path():
    given = choices(("dense/kernel", COLUMNS, 4), ("a.b/dense/kernel", WHOLE, 4))
    layout_map = layout_map_of(given, [])
    assert not layout_map["a.b/dense/kernel"]
    assert layout_map["dense/kernel"] == ((), ("logical",))


def test_variables_of_one_path_and_several_layouts_stay_whole():
    layout_map = layout_map_of(choices(("dense/kernel", COLUMNS, 4), ("dense/kernel", ROWS, 4)), [])
    assert len(layout_map) == 0


def test_replicated_variables_are_told_by_size():
    given = choices(
        ("a/scale", WHOLE, 1024), ("b_0/x", WHOLE, 4096), ("b_1/x", WHOLE, 4096), ("c/y", COLUMNS, 4096)
    )
    layout_map = layout_map_of(given, [])
    assert layout_map.replicated == {r"b_\d+/x": "8.0 KiB: why", "a/scale": "1.0 KiB: why"}
    assert type(layout_map).of(layout_map).replicated == layout_map.replicated
    assert all(re.compile(pattern) for pattern in layout_map.replicated)
    share, excess = excess_of_device(given, 2)
    assert (share, excess) == (pytest.approx((9 + 2) / (13 / 2)), 1024 * (11 - 6.5))
