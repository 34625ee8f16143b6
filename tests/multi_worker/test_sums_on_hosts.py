"""``strategy.reduce`` of several processes: on the hosts, or by JAX where one process cannot take part."""

import pytest

from programs import adding_on_hosts

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(
    scope="module",
    params=[
        (2, 1),
        pytest.param((2, 2), marks=pytest.mark.long),
        pytest.param((3, 1), marks=pytest.mark.long),
    ],
    ids=lambda size: f"{size[0]}_workers_of_{size[1]}",
)
def workers(request, reports_of):
    return reports_of(adding_on_hosts, workers=request.param[0], devices=request.param[1])


def test_the_best_transport_that_all_have_is_used(workers):
    for number, worker in enumerate(workers):
        assert worker["transport"] == "shared memory"
        assert not worker["has_sums"]
        of_two = {"connections"} if len(workers) == 2 else {"connections", "shared memory and connections"}
        assert worker["transport_without_memory"] in of_two
        assert worker["transport_without_ports"] is None
        (line,) = worker["lines"]
        assert "worker 1" in line, number
        assert "no port is free" in line


def test_all_workers_and_all_transports_have_the_same_bits(workers):
    for worker in workers:
        assert worker["shared"] == worker["connected"] == workers[0]["shared"]
        assert worker["by_jax"] == workers[0]["by_jax"]
        assert worker["alone"].items() <= worker["by_jax"].items()


def test_a_run_is_cut_at_its_sums(workers):
    for worker in workers:
        of_both = {"exchanges of a run": 1}.items()  # two sums that do not wait for each other
        assert of_both <= worker["shared"].items()
        assert of_both <= worker["connected"].items()
        assert worker["by_jax"]["exchanges of a run"] == 0
        assert worker["shared"]["run"] == worker["shared"]["SUM of float32[70001]"][2]


def test_dtypes_and_shapes_are_those_of_programs(workers):
    on_hosts, by_jax = workers[0]["shared"], workers[0]["by_jax"]
    for key in ("bool", "uneven rows", "scalars"):
        assert on_hosts[key] == by_jax[key], key
    assert on_hosts["used"] == pytest.approx(by_jax["used"])
    for key, (dtype, shape, bits) in [
        item for item in on_hosts.items() if item[0].startswith(("SUM of", "MEAN of", "gather of"))
    ]:
        assert (dtype, shape) == tuple(by_jax[key][:2]), key
        if key.startswith(("SUM of int", "gather")) or key.endswith("[0, 4]"):
            assert bits == by_jax[key][2], key
