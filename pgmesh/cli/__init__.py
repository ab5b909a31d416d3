"""The command line. ``check``, ``doctor``, ``plan``, ``report`` and ``show`` are commands; the other modules are shared.

Each command has ``add``, which declares its arguments, ``EXAMPLES`` for its help, and ``run``, which executes it.
"""
