"""Tests with the real launchers: torchrun, srun, mpirun of Open MPI and mpiexec of MPICH.

python -m tests.launchers      or     make test-launchers
"""
