"""Plans what a training step needs on hardware that is not here: TPUs, GPUs, or more devices of this machine.

The step is compiled for each topology, but not run, and nothing of the model's size is allocated. Plans for
TPUs and GPUs need their compilers (in the source's folder: pip install '.[plan-tpu,plan-gpu]') and, for GPUs,
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before Python starts. Without these it plans for this machine.
"""

import jax
import jax.numpy as jnp

import replicax as rx

NUM_LAYERS, WIDTH, ROWS = 48, 2048, 512
TOPOLOGIES = ("cpu:8", "v5e:4x4", "v5p:16x16x16", "h100:16x8")


def loss_of(weights, rows):
    def layer(hidden, weight):
        return hidden + jnp.tanh(hidden @ weight), None

    hidden, _ = jax.lax.scan(jax.checkpoint(layer), rows, weights)
    return rx.nn.compute_average_loss(jnp.mean(hidden**2, axis=1))


def step(weights, rows):
    """One step of one replica: it takes its rows of the batch, and returns the new weights."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, rows)
    gradients = rx.get_replica_context().all_reduce("sum", gradients)
    return weights - 1e-3 * gradients, loss


def main() -> None:
    strategy = rx.MirroredStrategy()
    weights = strategy.replicate(jax.ShapeDtypeStruct((NUM_LAYERS, WIDTH, WIDTH), jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)  # of each replica
    options = rx.RunOptions(donate_args=(0,))
    for topology in TOPOLOGIES:
        try:
            plan = strategy.plan(step, (weights, rows), options=options, topology=topology)
        except (rx.errors.MissingExtraError, rx.errors.PlanError) as error:
            print(f"{topology}: {error}")
            continue
        gib, least_s = plan.memory.peak / 2**30, plan.at_least_s
        print(
            f"{topology}: {plan.global_batch:,} rows, {gib:.2f} GiB of a device, which {'fits' if plan.fits else 'is too much'}; "
            f"{sum(plan.flops.values()):.3g} FLOP; at least {f'{least_s * 1e3:.2f} ms' if least_s else 'unknown'}"
        )
    print()
    print(strategy.plan(step, (weights, rows), options=options, topology=TOPOLOGIES[0]))


if __name__ == "__main__":
    main()
