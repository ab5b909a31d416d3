"""The command line, one module for each command: ``add`` declares its arguments, ``run`` executes it."""
