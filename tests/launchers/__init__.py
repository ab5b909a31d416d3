"""The real launchers: torchrun, srun, Open MPI's mpirun and MPICH's mpiexec, each starting a small program.

python -m tests.launchers      or     make test-launchers
"""
