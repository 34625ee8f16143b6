"""Tapes outside steps: their statements become a function that is traced."""

import textwrap

import pytest

from migrated import becomes, marks

HEAD = """\
import tensorflow as tf

BATCH = 3
model = tf.keras.Sequential()
optimizer = tf.keras.optimizers.SGD()
"""


def migrated(text):
    code = becomes(HEAD + textwrap.dedent(text))
    return code[code.index("optimizer = keras.optimizers.SGD()\n") :].removeprefix(
        "optimizer = keras.optimizers.SGD()\n"
    )


def test_a_loop_of_the_module():
    code = migrated(
        """
        total = 0.0
        # Ten times.
        for x in data:
            # mine
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x)) * BATCH
                total += loss

            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            print(loss)
        print(total)
        """
    )
    assert code == textwrap.dedent(
        """
        total = 0.0


        @rx.function
        def traced_step(model, x, total, optimizer):
            with rx.GradientTape() as tape:
                loss = ops.sum(model(x)) * BATCH
                total += loss

            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss, total


        # Ten times.
        for x in data:
            # mine
            loss, total = traced_step(model, x, total, optimizer)
            print(loss)
        print(total)
        """
    )


def test_method_and_used_name():
    code = migrated(
        """
        def traced_step(): pass

        class Trainer:
            def train(self, x):
                with tf.GradientTape() as tape:
                    loss = self.loss(x)
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, self.variables), self.variables)
                )
                return loss
        """
    )
    assert "def traced_step_2(self, x, optimizer):\n" in code
    assert (
        "    def train(self, x):\n        loss = traced_step_2(self, x, optimizer)\n        return loss\n"
        in code
    )
    assert "    with rx.GradientTape() as tape:\n        loss = self.loss(x)\n" in code


def test_tapes_at_once_and_a_tape_that_is_deleted():
    code = migrated(
        """
        with tf.GradientTape() as a, tf.GradientTape(persistent=True) as b:
            x = tf.ones(2)
        one = a.gradient(x, x)
        two = b.gradient(x, x)
        del a, b
        use(one)
        """
    )
    assert "@rx.function\ndef traced_step():\n" in code
    assert "    return one\n\n\none = traced_step()\nuse(one)\n" in code


def test_a_return_and_a_tape_in_a_tape():
    code = migrated(
        """
        def second(x):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    y = x * x
                first = inner.gradient(y, x)
            return first, outer.gradient(first, x)
        """
    )
    assert code == textwrap.dedent(
        """

        @rx.function
        def traced_step(x):
            with rx.GradientTape() as outer:
                with rx.GradientTape() as inner:
                    y = x * x
                first = inner.gradient(y, x)
            return first, outer.gradient(first, x)


        def second(x):
            return traced_step(x)
        """
    )


@pytest.mark.parametrize(
    "text",
    [
        "with tf.GradientTape() as tape:\n  y = x\nprint(tape.gradient(y, x))\n",
        "with tf.GradientTape() as tape, strategy.scope():\n  y = x\n",
        "with tf.GradientTape():\n  y = x\n",
        "def f(x):\n  with tf.GradientTape() as tape:\n    return x\n",
        "def f(x):\n  with tf.GradientTape() as tape:\n    y = x\n  return tape\n",
        "def f(x):\n  def g(z): return z\n  with tf.GradientTape() as tape:\n    y = g(x)\n",
        "class A:\n  with tf.GradientTape() as tape:\n    y = x\n  z = y\n",
        "def f(x):\n  with tf.GradientTape() as a:\n    with tf.GradientTape() as b:\n      y = x\n    print(y)\n  a.gradient(y, x)\n",
        "class A:\n  def f(self, x):\n    with tf.GradientTape() as tape:\n      self.y = x\n",
        "for x in data:\n  with tf.GradientTape() as tape:\n    if x: break\n",
        "with tf.GradientTape() as tape:\n  seen.append(x)\n",
        "with tf.GradientTape() as tape:\n  y = x.numpy()\n",
        "with tf.GradientTape() as tape:\n  y = float(x)\n",
        "with tf.GradientTape() as tape:\n  y = tf.random.normal(()) if x > 0 else z\n  while y > 0: y -= 1\n",
        "if True: x = tf.ones(2)\nwith tf.GradientTape() as tape:\n  z = y\n  y = x\n",
    ],
)
def test_untraceable_code_is_marked_and_unchanged(text):
    assert "tape" in [rule for rule, _ in marks(HEAD + text)]
    assert "def traced_step" not in migrated(text)


def test_ok_leaves_the_tape_unchanged():
    text = "# replicax migrate: ok\nwith tf.GradientTape() as tape:\n  y = x\n"
    assert "def traced_step" not in migrated(text)
    assert marks(HEAD + text) == []


def test_functions_of_its_statements_are_steps():
    code = migrated(
        """
        def loss_of(x):
            return tf.random.normal((2,)) + x

        with tf.GradientTape() as tape:
            loss = loss_of(x)
        """
    )
    assert "keras.random.normal" in code
    text = "def f(x):\n  if tf.reduce_any(x): return x\n  return x\nwith tf.GradientTape() as tape:\n  f(x)\n"
    assert ("condition", 7) in marks(HEAD + text)
