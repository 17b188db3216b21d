"""What each process of a run finds in its environment: who is who, and which devices it uses."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from absl import logging
from jax._src.clusters import cloud_tpu_cluster

from tests.services.ports import free_port
from tests.waiting import PATIENCE
from vit_jax.base.errors import ConfigError
from vit_jax.devices import engines, gpus, meshes, processes
from vit_jax.devices.local import warn_of_few_cores
from vit_jax.training.upkeep import announce

NODES, GPUS = 2, 8
EIGHT = ",".join(map(str, range(GPUS)))
STEP = "SLURM_STEP_TASKS_PER_NODE"


def slurm(node: int, local: int, per_node: int) -> dict[str, str]:
    """Variables of srun."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "gpu[01-02]",
        "SLURM_NTASKS": str(NODES * per_node),
        STEP: f"{per_node}(x{NODES})",
        "SLURM_NNODES": str(NODES),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node * per_node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_GPUS_ON_NODE": str(GPUS),
    }


def open_mpi(node: int, local: int, per_node: int) -> dict[str, str]:
    """Variables of mpirun, up to version 4."""
    return open_mpi_5(node, local, per_node) | {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    }


def open_mpi_5(node: int, local: int, per_node: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(NODES * per_node),
        "OMPI_COMM_WORLD_RANK": str(node * per_node + local),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(per_node),
    }


def given(node: int, local: int, per_node: int) -> dict[str, str]:
    """What 'vit_jax launch ray', SkyPilot's file and GPU pods of a JobSet set."""
    return {
        "JAX_COORDINATOR_ADDRESS": "host0:8476",
        "JAX_NUM_PROCESSES": str(NODES * per_node),
        "JAX_PROCESS_ID": str(node * per_node + local),
    }


def on_one_machine(node: int, local: int, per_node: int) -> dict[str, str]:
    """What launch/local.py sets."""
    return given(node, local, per_node) | {
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_node),
    }


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No engine around this process, and a node whose GPUs can be counted."""
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "JAX_", "CUDA_V")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(gpus, "on_node", lambda: GPUS)


def places(monkeypatch, engine, per_node: int, **variables) -> list[engines.Place]:
    """Of all processes, node by node."""
    found = []
    for node in range(NODES):
        for local in range(per_node):
            with monkeypatch.context() as patch:
                for name, value in (engine(node, local, per_node) | variables).items():
                    patch.setenv(name, value.replace("LOCAL", str(local)))
                found.append(engines.find_place())
    return found


ENGINES = [slurm, open_mpi, on_one_machine]


@pytest.mark.parametrize("engine", [*ENGINES, given])
@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": EIGHT}])
def test_the_only_process_of_a_node_uses_all_its_gpus(monkeypatch, engine, visible):
    found = places(monkeypatch, engine, per_node=1, **visible)
    assert [place.local_device_ids for place in found] == [None, None]
    assert [(place.process_id, place.num_processes) for place in found] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("per_node", [8, 4, 2])
@pytest.mark.parametrize("visible", [{}, {"CUDA_VISIBLE_DEVICES": EIGHT}])
def test_processes_of_a_node_share_its_gpus_without_rest_and_without_overlap(
    monkeypatch, engine, per_node, visible
):
    found = places(monkeypatch, engine, per_node, **visible)
    assert [place.process_id for place in found] == list(range(NODES * per_node))
    for node in range(NODES):
        ids = [place.local_device_ids for place in found[node * per_node :][:per_node]]
        assert sum(ids, []) == list(range(GPUS)) and {len(i) for i in ids} == {GPUS // per_node}


@pytest.mark.parametrize("engine", ENGINES)
def test_gpus_that_the_engine_shows_to_one_process_alone_are_all_its_own(monkeypatch, engine):
    # --gpus-per-task=1: with cgroups each is number 0 to its process, without them it has its own.
    for shown in ("LOCAL", "0", "GPU-LOCAL"):
        found = places(monkeypatch, engine, per_node=8, CUDA_VISIBLE_DEVICES=shown)
        assert {place.local_device_ids for place in found} == {None}


def test_workers_of_ray_see_their_own_gpus_and_use_all_of_them(monkeypatch):
    for per_node, shown in ((8, "LOCAL"), (1, EIGHT)):
        found = places(monkeypatch, given, per_node, CUDA_VISIBLE_DEVICES=shown)
        assert {place.local_device_ids for place in found} == {None}


def test_a_tpu_slice_on_gke_is_found_with_all_chips_of_each_host(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    # As launch/gke/jobset.yaml sets them for two slices of two hosts.
    variables = {
        "TPU_WORKER_HOSTNAMES": "b16-slice-1-0.b16,b16-slice-1-1.b16",
        "TPU_WORKER_ID": "1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = engines.find_place()
    assert (place.process_id, place.num_processes, place.local_device_ids) == (3, 4, None)
    assert place.find_coordinator(5) == "localhost:8482"


def test_a_pod_that_is_given_its_place_uses_all_its_gpus(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert {p.local_device_ids for p in places(monkeypatch, given, per_node=1)} == {None}


def test_jax_s_own_variable_decides(monkeypatch):
    found = places(monkeypatch, slurm, per_node=2, JAX_LOCAL_DEVICE_IDS="3,5")
    assert {tuple(place.local_device_ids) for place in found} == {(3, 5)}
    with pytest.raises(ConfigError, match="JAX_LOCAL_DEVICE_IDS=a"):
        places(monkeypatch, slurm, per_node=2, JAX_LOCAL_DEVICE_IDS="a")


def test_more_processes_than_gpus_on_a_node_are_an_error(monkeypatch):
    with pytest.raises(ConfigError, match="9 processes on this node share 8 GPUs"):
        places(monkeypatch, slurm, per_node=9)
    with pytest.raises(ConfigError, match="4 processes on this node share 2 GPUs"):
        places(monkeypatch, slurm, per_node=4, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="2")


def test_processes_that_compute_on_cpus_may_be_more_than_gpus(monkeypatch):
    found = places(monkeypatch, on_one_machine, per_node=16, JAX_PLATFORMS="cpu")
    assert {place.local_device_ids for place in found} == {None}
    assert gpus.wanted({"JAX_PLATFORMS": "cuda,cpu"}) and not gpus.wanted({"JAX_PLATFORMS": "tpu"})


def test_a_node_without_gpus_needs_none(monkeypatch):
    monkeypatch.setattr(gpus, "on_node", lambda: 0)
    found = places(monkeypatch, open_mpi, per_node=2, CUDA_VISIBLE_DEVICES="")
    assert {place.local_device_ids for place in found} == {None}


def test_nodes_may_run_different_numbers_of_processes(monkeypatch):
    variables = slurm(1, 0, 8) | {STEP: "8,1(x3)"}
    assert engines.node_rank("slurm", variables) == gpus.NodeRank(0, 1)
    assert engines.node_rank("slurm", variables | {"SLURM_NODEID": "0"}).count == 8
    del variables[STEP]  # as with older versions
    assert engines.node_rank("slurm", variables).count == 8


@pytest.mark.parametrize(
    ("variables", "allowed", "cores"),
    [
        ({}, 96, 96),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 96, 12),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, 4, 1),  # a container with few
        (slurm(0, 0, 1), 96, 96),
        (slurm(0, 3, 8) | {"SLURM_CPUS_ON_NODE": "96"}, 96, 12),  # --cpu-bind=none
        (slurm(0, 3, 8) | {"SLURM_CPUS_ON_NODE": "96"}, 12, 12),  # bound, as by train.sbatch
        (slurm(0, 3, 8) | {"SLURM_CPUS_ON_NODE": "96"}, 1, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 48, 24),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 24, 24),
    ],
)
def test_processes_of_a_node_share_its_cores(variables, allowed, cores):
    assert engines.share_of_cores(allowed, 96, variables) == cores


def test_open_mpi_5_needs_to_be_given_the_first_host(monkeypatch):
    with pytest.raises(ConfigError, match="--coordinator=HOST:PORT"):
        places(monkeypatch, open_mpi_5, per_node=4)
    found = places(monkeypatch, open_mpi_5, 4, JAX_COORDINATOR_ADDRESS="host0:8476")
    assert [place.process_id for place in found] == list(range(8))
    assert [place.local_device_ids for place in found[4:]] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def uses(used: list[int], nodes: list[str], **variables) -> list[dict]:
    return [
        gpus.describe_use(node, count, variables, GPUS)
        for node, count in zip(nodes, used, strict=True)
    ]


def test_gpus_that_stay_unused_are_found_node_by_node():
    assert gpus.find_unused(uses([8, 1], ["a", "b"])) == {"b": (1, 8)}
    assert gpus.find_unused(uses([4, 4, 4], ["a", "a", "b"])) == {"b": (4, 8)}
    assert gpus.find_unused(uses([1], ["a"], CUDA_VISIBLE_DEVICES="0,1")) == {"a": (1, 2)}
    # A part of a node may be all that a run was given.
    assert not gpus.find_unused(uses([2], ["a"], CUDA_VISIBLE_DEVICES="4,5"))
    assert not gpus.find_unused(uses([2], ["a"], SLURM_GPUS_ON_NODE="2"))
    two = [uses([1], ["a"], CUDA_VISIBLE_DEVICES=gpu)[0] for gpu in ("0", "1")]
    assert not gpus.find_unused(two)
    bound = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "8"}
    assert gpus.find_unused(uses([1] * 7, ["a"] * 7, **bound)) == {"a": (7, 8)}


def test_a_run_says_what_it_computes_with_and_warns_of_gpus_that_it_does_not_use(monkeypatch):
    logged = {"info": [], "warning": []}
    for level, lines in logged.items():
        monkeypatch.setattr(
            logging, level, lambda text, *values, to=lines: to.append(text % values)
        )
    announce.announce_devices(meshes.replica_mesh())
    devices = "devices: 8 x cpu, mesh data 8 x fsdp 1 x tensor 1"
    assert logged["info"] == [f"{devices}; cores: {len(os.sched_getaffinity(0))}"]
    assert "the run uses 0 of the node's 8 GPUs" in logged["warning"][0]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    announce.announce_devices(meshes.replica_mesh())
    assert len(logged["warning"]) == 1


@pytest.mark.parametrize(
    ("cores", "devices", "platform", "warned"),
    [(1, 1, "gpu", "1 core for 1 GPU:"), (2, 8, "gpu", "2 cores for 8 GPUs:"), (4, 4, "tpu", "4 TPUs"),
     (64, 8, "gpu", None), (2, 1, "tpu", None), (2, 8, "cpu", None)],
)  # fmt: skip
def test_a_host_with_at_most_one_core_for_each_accelerator_is_warned_of(
    cores, devices, platform, warned
):
    text = warn_of_few_cores(cores, [SimpleNamespace(platform=platform)] * devices)
    assert (warned in text and "--cpu-bind=none" in text) if warned else text == ""


JOIN = """
import json, os, jax
from jax._src import xla_bridge
from vit_jax.devices import processes
jax.config.update("jax_num_cpu_devices", 8)
processes.initialize()
print(json.dumps([jax.process_index(), jax.local_device_count(), jax.device_count(),
                  xla_bridge.CUDA_VISIBLE_DEVICES.value]))
processes.barrier("end")
"""


@pytest.mark.parametrize("engine", [slurm, open_mpi])
def test_two_nodes_of_eight_devices_compute_with_sixteen(engine):
    """Real processes that join each other; on a node with GPUs jax_cuda_visible_devices hides them."""
    port = free_port()
    here = {"slurm": {"SLURM_STEP_NODELIST": "localhost"},
            "open_mpi": {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://127.0.0.1:1"}}  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN], stdout=subprocess.PIPE, text=True,
            env=os.environ | engine(node, 0, 1) | here[engine.__name__]
            | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_COORDINATOR_PORT": str(port)},
        )
        for node in range(NODES)
    ]  # fmt: skip
    printed = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [json.loads(line) for line in printed] == [[0, 8, 16, "all"], [1, 8, 16, "all"]]


def test_jax_itself_would_use_one_gpu_of_each_node(monkeypatch):
    """Why `engines` exists; when this fails, JAX has changed."""
    for name, value in slurm(1, 0, 1).items():
        monkeypatch.setenv(name, value)
    found = jax._src.clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, "slurm", 1
    )
    assert found[1:] == (2, 1, [0])
    assert processes.count() == 1
