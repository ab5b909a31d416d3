"""The command line. ``arguments`` and ``output`` are shared; each other module is a command.

Each command has ``add``, which declares its arguments, ``EXAMPLES`` for its help, and ``run``, which executes it.
"""
