"""``rx.visualize`` finds the parts of values from their shardings only."""

import subprocess
import sys
import types
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax._src.drawing import svg
from replicax.experimental.partitioners import FixedShardsPartitioner

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture):
    return [text.text for text in ElementTree.fromstring(picture.to_svg()).iter(f"{SVG}text")]


def cut_over(names, *, shape=(2, 4)):
    mesh = jax.make_mesh(shape, ("a", "b"))
    return jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(mesh, jax.P(*names)))


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(2)


def test_array_sharded_along_two_dims(capsys):
    picture = rx.visualize(cut_over(("a", "b")))
    assert picture.layouts[0].pieces == (2, 4)
    assert picture.layouts[0].device_bytes == 4 * 4 * 4
    lines = str(picture).splitlines()
    row = next(line for line in lines if line.startswith("4:8"))
    assert row.split("│")[1].strip() == "cpu:4"
    assert {f"cpu:{i}" for i in range(8)} <= set(texts_of(picture))
    assert "cpu:7" in capsys.readouterr().out, "a script shows it"


def test_replicated_array():
    (layout,) = rx.visualize(cut_over((None, "b"))).layouts
    assert [part.places for part in layout.parts] == ["cpu:0, 4", "cpu:1, 5", "cpu:2, 6", "cpu:3, 7"]
    assert layout.told == "dim 1 in 4 pieces, each on 2 devices"
    (layout,) = rx.visualize(cut_over(())).layouts
    assert [part.places for part in layout.parts] == ["cpu:0–7"]


def test_variables_and_values_of_replicas(strategy):
    with strategy.scope():
        whole = rx.Variable([1.0, 2.0], name="w")
        own = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    assert rx.visualize(whole).layouts[0].told == "whole on each of 2 devices"
    assert [part.places for part in rx.visualize(own).layouts[0].parts] == [
        "replica 0 · cpu:0",
        "replica 1 · cpu:1",
    ]
    dataset = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones((3, 2), "float32")).batch(3)
    )
    element = next(iter(dataset))
    assert [part.places for part in rx.visualize(element).layouts[0].parts] == [
        "replica 0 · cpu:0 · [2, 2]",
        "replica 1 · cpu:1 · [1, 2]",
    ]
    assert not element.is_shared, "it may still be donated"


def test_every_variable_of_a_model():
    with rx.MirroredStrategy(2, shard_state="all").scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="hidden")])
        model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 8)), verbose=0)
    picture = rx.visualize(model)
    names = {layout.name for layout in picture.layouts}
    assert names >= {variable.path for variable in [*model.variables, *model.optimizer.variables]}
    kernel = next(layout for layout in picture.layouts if layout.name.endswith("hidden/kernel"))
    assert np.prod(kernel.pieces) == 2
    assert kernel.name in texts_of(picture)
    assert all(len(line) <= 80 for line in str(picture).splitlines())


def test_tables_on_parameter_servers():
    with in_memory_strategy(1, 2, FixedShardsPartitioner(2)) as strategy, strategy.scope():
        table = rx.Variable(np.ones((6, 2), "float32"), name="table")
        table.assign(np.zeros((6, 2), "float32"))
        (held,) = table.shards.held
        holder, held._value.holder = held._value.holder, types.SimpleNamespace()  # which cannot read
        (layout,) = rx.visualize(table).layouts
        held._value.holder = holder
    assert {(part.index[0], part.places) for part in layout.parts} == {((0, 3), "ps 0"), ((3, 6), "ps 1")}


def test_parts_of_other_processes_are_drawn_as_theirs(monkeypatch):
    array = cut_over(("a", "b"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    picture = rx.visualize(array)
    assert not any(part.is_local for part in picture.layouts[0].parts)
    assert all(part.places.startswith("process 0 cpu:") for part in picture.layouts[0].parts)
    assert "(pro… 0 cpu:5)" in str(picture)
    rects = list(ElementTree.fromstring(picture.to_svg()).iter(f"{SVG}rect"))
    assert sum(rect.get("stroke-dasharray") is not None for rect in rects) == 8


def test_pytrees_host_values_and_donated_values(strategy):
    gone = jnp.ones(3)
    gone.delete()
    told = {one.name: one.told for one in rx.visualize({"a": np.ones(2), "b": gone, "c": None}).layouts}
    assert told == {"['a']": "on the host", "['b']": "was deleted, or given to a program"}
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"next\(iter\(dataset\)\)"):
        rx.visualize(strategy)


def test_files_and_pages(tmp_path):
    picture = rx.visualize(cut_over(("a", "b")))
    picture.save(tmp_path / "layout.svg")
    assert (tmp_path / "layout.svg").read_text() == picture.to_svg()
    assert "<script" not in picture._repr_html_()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_lines_are_no_wider_than_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    array = jax.device_put(jnp.ones((8, 16)), jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a")))
    for value in (array, cut_over(("a", "b")), {"a" * 70: array, "b": array}):
        for line in str(rx.visualize(value)).splitlines():
            assert len(line) <= max(width, 40), line


def test_many_parts_are_cut_short():
    from replicax._plan.pictures.visualize import _elided

    assert _elided(100) == [*range(14), None, 99]
    assert _elided(16) == list(range(16))


def test_without_rich_it_is_plain_text(strategy, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    picture = rx.visualize(jnp.ones(3))
    assert capsys.readouterr().out == f"{picture}\n"


def test_names_keep_their_beginning_and_their_end():
    assert svg.shortened("abcdefghij", 7) == "ab…ghij"
    assert svg.shortened("abc", 7) == "abc"


def test_prompt_draws_it_once():
    code = (
        "import sys; sys.ps1 = '> '; import jax.numpy as jnp, replicax as rx; p = rx.visualize(jnp.ones(3))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not run.stdout


def test_model_without_variables_raises_and_says_what_to_do():
    with pytest.raises(rx.errors.InvalidArgumentError, match="Build it"):
        rx.visualize(keras.Sequential([keras.layers.Dense(2)]))
