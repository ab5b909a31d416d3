"""The command line, one file for each command: ``add`` declares its arguments, ``run`` does it."""
