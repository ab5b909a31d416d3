"""Tests that need a GPU: ``make test-gpu``. The suite of ``make test`` does not collect them.

``one_rank.py`` is a world of one rank on NCCL, ``eight_ranks.py`` eight processes that share the GPU through Gloo.
They need torch, cachetools and pytest alone. PGMESH_TEST_DEVICE=cpu runs them on Gloo without a GPU, to test the tests.
"""
