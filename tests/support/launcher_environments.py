"""Environment variables of ranks under each launcher, recorded from real runs; see docs/launchers.md."""

from __future__ import annotations

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "8",
}
BY_HAND = {name: TORCHRUN[name] for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}

ALLOCATION = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
}
"""The environment of a shell that salloc starts."""

BATCH = ALLOCATION | {"SLURM_GTIDS": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
"""The environment of a script that sbatch starts."""

SRUN = ALLOCATION | {
    "SLURM_GTIDS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
}
"""The environment of srun's rank 3 of 4, the only one on the second host."""

ONE_HOST = SRUN | {
    "SLURM_GTIDS": "0,1,2,3",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4",
}

SMALL_STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
"""The least that srun sets: no lists of hosts and tasks."""

DAEMON = SRUN | {
    "SLURM_GTIDS": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
"""The environment of mpirun's daemons when srun starts them; their ranks inherit it."""

OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "1776680961",
    "PMIX_RANK": "3",
}
HYDRA = {"MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "4"}
HYDRA_ON_TWO = HYDRA | {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
CRAY = {"PALS_APID": "8af-01", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "2", "PMI_RANK": "3", "PMI_SIZE": "4"}
