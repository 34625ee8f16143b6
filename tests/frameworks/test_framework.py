"""The frameworks in use, their order, and the owner of an object that two frameworks know."""

import sys

import keras
import pytest
from flax import nnx

import replicax as rx
from checks import in_a_process_of_its_own
from replicax._src.checkpoint.graph import Graph
from replicax._src.values import framework
from replicax._src.values.framework import Framework, Tracking


@pytest.fixture
def in_use(monkeypatch):
    """Frameworks for this test only."""

    def use(*frameworks):
        monkeypatch.setattr(framework, "_in_use", framework._InUse(()))
        for each in frameworks:
            framework.use(each)

    return use


class Both:
    """An object that two frameworks know."""


def test_order_of_frameworks_does_not_depend_on_import_order(in_use):
    keras_first = Framework("keras", tracking=Tracking(lambda tracked: {"of": "keras"}))
    nnx_first = Framework("flax.nnx", tracking=Tracking(lambda tracked: {"of": "nnx"}))
    for order in ((keras_first, nnx_first), (nnx_first, keras_first)):
        in_use(*order)
        assert [each.name for each in framework.frameworks_in_use()] == ["keras", "flax.nnx"]
        assert framework.trackings()[0].parts_of(Both()) == {"of": "keras"}


def test_a_framework_is_used_once_and_can_be_forgotten(in_use):
    first = Framework(
        "keras", variable_types=(Both,), make_binding=lambda variable, replicas: ("binding", replicas)
    )
    in_use(first, Framework("keras"))
    assert framework.frameworks_in_use() == (first,)
    assert framework.is_variable(Both())
    assert framework.make_binding(Both(), 3) == ("binding", 3)
    framework.stop_using("keras")
    assert not framework.is_variable(Both())


def test_imported_frameworks_are_used_and_no_others():
    """A framework that the user has not imported costs nothing; an imported one is used from the next scope on."""
    program = """
    import sys
    import replicax as rx
    from replicax._src.values.framework import frameworks_in_use
    strategy = rx.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        rx.Variable(1.0)
    print([each.name for each in frameworks_in_use()], "keras" in sys.modules, "flax" in sys.modules)
    from flax import nnx
    with strategy.scope():
        print([each.name for each in frameworks_in_use()], "keras" in sys.modules)
    import keras
    with strategy.scope():
        print([each.name for each in frameworks_in_use()])
    """
    printed = in_a_process_of_its_own(program, "-W", "error", KERAS_BACKEND="jax").splitlines()
    assert printed == [
        "['replicax'] False False",
        "['replicax', 'flax.nnx'] False",
        "['replicax', 'keras', 'flax.nnx']",
    ]


def test_variables_and_modules_of_three_frameworks_are_saved_side_by_side():
    with rx.OneDeviceStrategy("cpu:0").scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        checkpoint = rx.Checkpoint(
            ours=rx.Variable(1.0), layer=layer, module=nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        )
    keys = {key for key, _ in Graph(checkpoint).leaves()}
    assert keys == {"ours", "layer/kernel", "layer/bias", "module/kernel", "module/bias"}


def test_replicax_leaves_the_finders_of_imports_alone():
    finders = list(sys.meta_path)
    with rx.OneDeviceStrategy("cpu:0").scope():
        pass
    assert sys.meta_path == finders


def test_unseen_keras_objects_in_a_scope_raise_in_every_case():
    program = """
        import replicax as rx
        strategy = rx.MirroredStrategy(1)
        try:
            with strategy.scope():
                import keras
                model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                rx.Checkpoint(model=model)
        except rx.errors.KerasScopeError:
            print("told")
        with strategy.scope():
            import keras.utils
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    """
    assert in_a_process_of_its_own(program, KERAS_BACKEND="jax") == "told\n"


def test_keras_may_be_imported_in_a_scope_that_makes_nothing_and_after_a_checkpoint_that_saves_its_models(
    tmp_path,
):
    program = f"""
        import replicax as rx
        checkpoint = rx.Checkpoint(step=rx.Variable(0))
        strategy = rx.MirroredStrategy(1)
        with strategy.scope():  # it ends without an error
            try:
                with strategy.scope():
                    import keras
                    keras.utils.to_categorical([0, 1])
                    raise KeyError("own")  # and no error of the scope
            except KeyError as error:
                print(error)
        checkpoint.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        print(bool(checkpoint.save({str(tmp_path / "c")!r})))
    """
    assert in_a_process_of_its_own(program, KERAS_BACKEND="jax") == "'own'\nTrue\n"
